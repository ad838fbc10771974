"""From the engine's output to the result that the ledger keeps."""

from __future__ import annotations

from headrace.contract import Choice, JobResult, TokenLogprob, TopLogprob, Usage

from engine import request as engine
from engine.request import FinishReason, RequestOutput


def job_result(output: RequestOutput) -> JobResult:
    """What a request generated, whatever its end."""
    prompt = len(output.prompt_token_ids)
    produced = sum(len(choice.token_ids) for choice in output.choices)
    several = len(output.choices) > 1
    return JobResult(
        text=output.text,
        token_ids=list(output.token_ids),
        finish_reason=None if output.finish_reason is FinishReason.ERROR else output.finish_reason.value,
        stop_reason=output.stop_reason,
        usage=Usage(
            prompt_tokens=prompt,
            completion_tokens=produced,
            total_tokens=prompt + produced,
            cached_tokens=output.metrics.cached_tokens,
        ),
        logprobs=None if several or output.logprobs is None else [shown_logprob(one) for one in output.logprobs],
        prompt_logprobs=output.prompt_logprobs and [one and shown_logprob(one) for one in output.prompt_logprobs],
        embedding=None if output.embedding is None else list(output.embedding),
        choices=[_choice(choice) for choice in output.choices] if several else [],
    )


def _choice(choice: engine.Choice) -> Choice:
    return Choice(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        finish_reason=None if choice.finish_reason is FinishReason.ERROR else choice.finish_reason.value,
        stop_reason=choice.stop_reason,
        logprobs=choice.logprobs and [shown_logprob(one) for one in choice.logprobs],
    )


def shown_logprob(found: engine.TokenLogprob) -> TokenLogprob:
    """A token's logprobs as the contract has them."""
    top = [
        TopLogprob(token=one.token, token_id=one.token_id, logprob=one.logprob, bytes=list(one.bytes))
        for one in found.top
    ]
    return TokenLogprob(
        token=found.token,
        token_id=found.token_id,
        logprob=found.logprob,
        bytes=list(found.bytes),
        rank=found.rank,
        top=top,
    )
