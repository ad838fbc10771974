"""How a job's tokens are chosen, reported and ended: the part of a request that the engine reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StringConstraints
from typing_extensions import TypedDict

MOST_CHOICES = 16
MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_REGEX_CHARS = 8_192
MOST_GRAMMAR_CHARS = 16_384

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, strict=True)]


class PlainText(TypedDict):
    """No format at all, as OpenAI names it."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    type: Literal["text"]


class JsonObject(TypedDict):
    """Any JSON object."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    type: Literal["json_object"]


class NamedSchema(TypedDict):
    """A JSON schema under OpenAI's names; only `schema` decides."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    schema: dict[str, Any]
    name: NotRequired[str]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


class JsonSchema(TypedDict):
    """JSON that a schema describes."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


def _few_biases(pairs: Any) -> Any:
    """Count before looking: a fault for each of a million entries would cost more memory than the entries."""
    if isinstance(pairs, dict) and len(pairs) > MOST_BIASES:
        raise ValueError(f"at most {MOST_BIASES} token ids, got {len(pairs)}")
    return pairs


class SamplingFields(BaseModel):
    """Sampling parameters under the names, and with the meanings, of OpenAI's and vLLM's APIs.

    Of parameters that leave no token between them a grammar is the strongest, then
    `allowed_token_ids`, then `min_tokens`, then `bad_words`.
    """

    max_tokens: Annotated[
        int, Field(ge=0, strict=True, description="Most tokens to generate; 0 gives an empty text")
    ] = 256
    min_tokens: Annotated[int, Field(ge=0, strict=True, description="Nothing ends the text before this many")] = 0
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False, strict=True, description="0 is greedy")] = (
        1.0
    )
    top_p: Annotated[
        float, Field(ge=0, le=1, allow_inf_nan=False, strict=True, description="0 keeps the likeliest token only")
    ] = 1.0
    top_k: Annotated[int, Field(ge=-1, strict=True, description="-1 and 0 keep every token")] = 0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)] = 0.0
    seed: Annotated[
        int | None, Field(ge=0, lt=2**63, strict=True, description="Drawn when the job is accepted, if absent")
    ] = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] = []
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False

    n: Annotated[
        int, Field(ge=1, le=MOST_CHOICES, strict=True, description="Completions, each with a seed from (seed, index)")
    ] = 1
    repetition_penalty: Annotated[
        float,
        Field(
            ge=0.01,
            le=100,
            allow_inf_nan=False,
            strict=True,
            description="Over 1: tokens of the prompt and the output get less likely",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Field(
            ge=-2, le=2, allow_inf_nan=False, strict=True, description="Over 0: tokens of the output get less likely"
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Field(ge=-2, le=2, allow_inf_nan=False, strict=True, description="The same, for each time that they occur"),
    ] = 0.0
    logit_bias: Annotated[
        dict[
            Annotated[int, Field(ge=0)],
            Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False, strict=True)],
        ]
        | None,
        BeforeValidator(_few_biases),
        Field(description="Token id to what is added to its logit"),
    ] = None
    bad_words: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"\S")]],
        Field(max_length=128, fail_fast=True, description="Never generated, in the tokens that they are encoded to"),
    ] = []
    allowed_token_ids: Annotated[
        list[TokenId] | None,
        Field(min_length=1, max_length=65_536, fail_fast=True, description="Nothing else is generated"),
    ] = None
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MOST_LOGPROBS, strict=True, description="Report each token, and so many of the likeliest"),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MOST_LOGPROBS,
            strict=True,
            description="The same for the prompt; with max_tokens 0 nothing is generated",
        ),
    ] = None
    response_format: Annotated[ResponseFormat | None, Field(description="As OpenAI's")] = None
    guided_regex: Annotated[
        str | None, Field(min_length=1, max_length=MOST_REGEX_CHARS, description="The whole text matches it")
    ] = None
    guided_choice: Annotated[
        list[StopText] | None,
        Field(min_length=1, max_length=1000, fail_fast=True, description="The text is one of these"),
    ] = None
    guided_grammar: Annotated[
        str | None, Field(min_length=1, max_length=MOST_GRAMMAR_CHARS, description="A Lark grammar, from `start`")
    ] = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form it came in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_sampling(self) -> None:
        """Raise ValueError for parameters that contradict each other."""
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})")
        grammars: Sequence[str] = [name for name in GRAMMARS if getattr(self, name) not in (None, {"type": "text"})]
        if len(grammars) > 1:
            raise ValueError(f"a text follows one grammar, and {' and '.join(grammars)} are given")


GRAMMARS = ("response_format", "guided_regex", "guided_choice", "guided_grammar")
