"""Text on its way in and out of a model: tokenizer, chat template, detokenizer, stop strings. No torch.

Shared by the engine and the HTTP door, so that both count the same tokens.
"""
