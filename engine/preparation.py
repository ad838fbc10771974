"""From a request to the generations that fulfil it: tokens, limits, rules. Touches no state of the engine."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace

from engine.batch import ModelInfo
from engine.choices import Choices
from engine.config import EngineConfig
from engine.generation import Generation, ProgressUnusable
from engine.grammar import Grammars
from engine.memory import root_hash
from engine.request import EngineRequest, RequestRefused
from engine.rules import TokenRules
from engine.sequence import RowSampling, TokenSequence
from kernels.sampling import choice_seed
from text.grammar import GrammarError, grammar_of
from text.limits import PromptRefused, check_adapter, check_prompt, most_tokens
from text.parameters import check_parameters
from text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Preparation:
    """What is slow in taking a request, for any thread: tokenising, checking, compiling its grammar."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, config: EngineConfig) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._vocab_size = info.vocab_size
        self._revision = info.revision
        self._config = config
        self._grammars = Grammars(tokenizer, info.vocab_size)

    def compiles(self, request: EngineRequest) -> bool:
        """Whether `prepare` has to compile the request's grammar, which may take seconds."""
        grammar = grammar_of(request.params)
        return grammar is not None and not self._grammars.knows(grammar)

    def prepare(self, request: EngineRequest, arrived_s: float, max_seq_len: int) -> Choices:
        """A request's generations, or `RequestRefused`. Progress that it can't have made is left out."""
        self._check_kind(request)
        generations = self._generations(request, max_seq_len)
        try:
            for progress in request.progress:
                scores_prompt = progress.index == 0 and request.params.prompt_logprobs is not None
                # A completion that has its last token already would not have its prompt scored.
                generations[progress.index].replay(progress.without_last if scores_prompt else progress)
        except (ProgressUnusable, IndexError) as error:
            log.warning("request %s begins anew, its progress can't be used: %s", request.id, error)
            generations = self._generations(request, max_seq_len)
        return Choices(request, generations, arrived_s)

    def _check_kind(self, request: EngineRequest) -> None:
        """Refuse what the model has no part for."""
        params = request.params
        if not request.embeds and not self._info.generates:
            raise RequestRefused("invalid_request", "this model makes embeddings and no text", "prompt")
        if request.embeds and self._info.pooling is None:
            raise RequestRefused(
                "invalid_request",
                "this model is served without embeddings: start its workers with HEADRACE_MODEL__EMBEDDINGS=true",
                "prompt",
            )
        if request.embeds and (params.max_tokens, params.n, params.prompt_logprobs) != (0, 1, None):
            raise RequestRefused("invalid_request", "an embedding has no output, so max_tokens must be 0", "max_tokens")

    def _generations(self, request: EngineRequest, max_seq_len: int) -> list[Generation]:
        """The request's completions at their beginning."""
        params = request.params
        try:
            tokens = self._checked(request, max_seq_len)
            own_ends = () if params.ignore_eos else self._tokenizer.eos_token_ids
            end_ids = tuple(sorted({*own_ends, *params.stop_token_ids}))
            first = self._sequence(request, tokens, end_ids, max_seq_len)
            sequences = [first, *(self._another(first, request, index) for index in range(1, params.n))]
            grammar = grammar_of(params)
            words = self._tokenizer.encode_words(params.bad_words)
            for sequence in sequences:
                matcher = None if grammar is None else self._grammars.matcher(grammar, end_ids)
                sequence.rules = TokenRules.of(params, self._vocab_size, words, matcher)
        except PromptRefused as refused:
            raise RequestRefused(refused.code, str(refused), refused.param) from refused
        except GrammarError as error:
            raise RequestRefused("invalid_request", f"{error.param}: {error}", error.param) from error
        return [
            Generation(request.id, index, params, sequence, self._tokenizer) for index, sequence in enumerate(sequences)
        ]

    def _checked(self, request: EngineRequest, max_seq_len: int) -> list[int]:
        params, tokenizer = request.params, self._tokenizer
        check_adapter(request.adapter, self._info.adapters)
        tokens = check_prompt(
            tokenizer,
            prompt=request.prompt,
            messages=request.messages,
            max_tokens=params.max_tokens,
            max_seq_len=max_seq_len,
            whole=request.embeds,
        )
        check_parameters(
            params,
            prompt_tokens=len(tokens),
            max_seq_len=max_seq_len,
            vocab_size=self._vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        return tokens

    def _sequence(
        self, request: EngineRequest, tokens: list[int], end_ids: tuple[int, ...], max_seq_len: int
    ) -> TokenSequence:
        params = request.params
        max_len = len(tokens) + most_tokens(len(tokens), params.max_tokens, max_seq_len)
        thinned = self._config.kv_compression.touches(max(len(tokens), max_len - 1))
        root = None if thinned else self._root(request)
        sequence = TokenSequence(
            id=f"0:{request.id}",
            tokens=tokens,
            prompt_tokens=len(tokens),
            max_len=max_len,
            priority=request.priority,
            tenant=request.tenant,
            deadline_s=request.deadline_s,
            adapter=0 if request.adapter is None else list(self._info.adapters).index(request.adapter) + 1,
            sampling=RowSampling.of(params),
            end_ids=end_ids,
            ends_from=len(tokens) + params.min_tokens,
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            root=root,
            pooling=self._info.pooling if request.embeds else None,
        )
        if root is not None:
            sequence.page_hashes(self._config.page_size)  # here rather than between two steps
        return sequence

    def _root(self, request: EngineRequest) -> bytes | None:
        """Whose KV the request may share: that of its namespace, or that of its own completions only, or nobody's."""
        pools_all = request.embeds and self._info.pooling is not None and self._info.pooling.kind != "last"
        if request.params.prompt_logprobs is not None or pools_all:
            return None
        if self._config.enable_prefix_caching:
            adapter = "" if request.adapter is None else f"+{self._info.adapters[request.adapter]}"
            return root_hash(f"{self._revision}{adapter}/{request.namespace}")
        return secrets.token_bytes(16) if request.params.n > 1 else None

    @staticmethod
    def _another(first: TokenSequence, request: EngineRequest, index: int) -> TokenSequence:
        """The sequence of another completion: its own seed, and nothing to say about the prompt."""
        return replace(
            first,
            id=f"{index}:{request.id}",
            tokens=list(first.tokens),
            sampling=first.sampling._replace(seed=choice_seed(first.sampling.seed, index)),
            prompt_logprobs=-1,
            pages=[],
            hashes=list(first.hashes),
        )
