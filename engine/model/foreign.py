"""Models that the decoder doesn't know, by the code that `transformers` has for them, with paged attention put in.

That code is taken at its word for everything but attention: what it hands to its attention function is what
the kernels get. Whether that is all there is to it (no state beside the KV, no other mask) can't be seen from
outside, so it is tried out when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.model import check_compression
from engine.model.foreign_attention import ATTENTION, PagedStep, Probe, register
from engine.model.hf_dir import HFDirectory
from engine.model.spec import ForeignModel, ModelSpec, UnsupportedModel
from kernels.adapters import AdapterRows
from kernels.kv import UNIT_BYTES, KVLayout
from kernels.protocol import AttentionMetadata, Kernels
from kernels.registry import get_kernels

TRIAL_CHUNKS = (7, 1, 4)
"""Tokens of each step of the trial."""
TRIAL_PAGE_SIZE = 4
MOST_DIFFERENCE = {torch.float32: 1e-3}
"""Mean difference of the trial's logits over their deviation, by type."""
MOST_ROUGH_DIFFERENCE = 0.1
"""The same for types of two bytes."""


class ForeignDecoder:
    """What `engine.model.decoder.Decoder` is, over a model of `transformers`."""

    def __init__(self, model: Any, spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, vocab_size: int) -> None:
        """Takes the model apart: its body here, its head under its own `forward`, which knows scales and caps."""
        self.spec = spec
        self.kernels = kernels
        self.dtype = dtype
        self._body = model.base_model
        self._head = model
        setattr(model, model.base_model_prefix, _Echo())
        self._vocab_size = vocab_size
        self._still = torch.empty(spec.context_len, 2, 0, device=model.device)

    def hidden(
        self,
        token_ids: Tensor,
        meta: AttentionMetadata,
        kv: Sequence[Any],
        rows: Tensor,
        adapted: AdapterRows | None = None,
    ) -> Tensor:
        """Tokens [T] and the KV pool of each layer -> what the head reads of `rows`, [S, hidden].

        No row is adapted: no adapter is loaded beside such a model.
        """
        meta = self.kernels.prepare(meta, self.dtype)
        step = PagedStep(self.kernels, meta, kv, self._still, self.spec.global_window)
        body = self._body(
            input_ids=token_ids[None].long(), position_ids=meta.positions[None].long(), use_cache=False, headrace=step
        )
        hidden: Tensor = body.last_hidden_state[0].index_select(0, rows)
        return hidden

    def logits(self, x: Tensor) -> Tensor:
        """What the head reads, [S, hidden] -> logits float32 [S, V]."""
        if not len(x):
            return x.new_empty(0, self._vocab_size, dtype=torch.float32)
        logits: Tensor = self._head(inputs_embeds=x[None], use_cache=False).logits[0]
        return logits[:, : self._vocab_size].float()


class _Echo(nn.Module):
    """A body that gives back what it gets, so that a model is nothing but its head."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _output_class()(last_hidden_state=inputs_embeds)


@cache
def _output_class() -> Any:
    """Of a body's output: with all that a head asks of one."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):
        cross_attentions = None

    return Output


def load_foreign(
    config: EngineConfig,
    directory: HFDirectory,
    reason: ForeignModel,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
) -> ForeignDecoder:
    """The model of a directory that isn't ours for that `reason`. Raises UnsupportedModel if this way doesn't do."""
    register()
    model = _load(directory, reason, dtype).to(device)
    vocab_size = min(directory.text.vocab_size, directory.vocab_rows)
    ids = torch.arange(3, 3 + sum(TRIAL_CHUNKS), device=device)[None] % vocab_size
    probe = Probe()
    try:
        model.base_model(input_ids=ids, use_cache=False, headrace=probe)
        spec = probe.spec(model, directory)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{reason}; nor can transformers' code serve it here: {error}") from error
    model.set_attn_implementation("eager")
    expected = model(input_ids=ids, use_cache=False).logits[0, :, :vocab_size].float()
    model.set_attn_implementation(ATTENTION)
    # Whatever the KV is to be kept as.
    trial = ForeignDecoder(model, spec, get_kernels(device, choice=config.kernels), dtype, vocab_size)
    try:
        difference = ((_trial(trial, ids[0], device) - expected).abs().mean() / expected.std()).item()
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"{reason}; nor can transformers' code serve it here: {error}") from error
    if not difference <= MOST_DIFFERENCE.get(dtype, MOST_ROUGH_DIFFERENCE):
        raise UnsupportedModel(
            f"{reason}; nor can transformers' code serve it here: with paged attention its logits differ from its own"
            f" by {difference:.2g} of their deviation, so it looks at more than its keys and values"
        )
    trial.spec = spec.narrowed(config.sliding_window)
    check_compression(config, trial.spec)
    trial.kernels = kernels
    return trial


def _load(directory: HFDirectory, reason: ForeignModel, dtype: torch.dtype) -> Any:
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UnsupportedModel(f"{reason}; 'pip install transformers' lets its code serve other models") from error
    try:
        settings = AutoConfig.from_pretrained(directory.path, trust_remote_code=False)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(settings), None)
    except Exception as error:  # of its own kinds, beside ValueError and OSError
        raise UnsupportedModel(f"{reason}; nor has transformers code for it: {error}") from error
    if kind is None or kind.__name__ not in (settings.architectures or []):
        raise UnsupportedModel(f"{reason}; nor does transformers know it as a model that generates text")
    if not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{reason}; nor does transformers' code for it let other code do its attention")
    _ = directory.tensor_files  # refuses pickles by name
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory.path,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise UnsupportedModel(f"{reason}; nor can transformers load it: {error}") from error
    model, found = loaded
    if found["missing_keys"]:
        raise UnsupportedModel(f"{reason}; transformers' code finds no tensors {', '.join(found['missing_keys'])}")
    return model.eval()


def _trial(decoder: ForeignDecoder, ids: Tensor, device: torch.device) -> Tensor:
    """Logits of all tokens, computed in several steps through pages out of order."""
    spec, total = decoder.spec, len(ids)
    layout = KVLayout(spec.layers, spec.kv_heads, spec.head_size, decoder.dtype.itemsize, TRIAL_PAGE_SIZE)
    table = list(range(-(-total // TRIAL_PAGE_SIZE)))[::-1]
    storage = torch.zeros(layout.units_for(len(table)) * UNIT_BYTES, dtype=torch.uint8, device=device)
    kv = decoder.kernels.kv_views(storage, layout, decoder.dtype)

    def i32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    logits, done = [], 0
    for count in TRIAL_CHUNKS:
        positions = range(done, done + count)
        done += count
        meta = AttentionMetadata(
            positions=i32(positions),
            slots=i32([table[p // TRIAL_PAGE_SIZE] * TRIAL_PAGE_SIZE + p % TRIAL_PAGE_SIZE for p in positions]),
            query_start=i32([0, count]),
            context_len=i32([done]),
            block_table=i32(table)[None],
            max_query=count,
            max_context=done,
            layout=layout,
        )
        logits.append(decoder.logits(decoder.hidden(ids[done - count : done], meta, kv, i32(range(count)))))
    return torch.cat(logits)
