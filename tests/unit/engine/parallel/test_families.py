"""Every family over several ranks: the tokens of one, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.parallel.group import Group
from engine.runner import TorchModel
from tests.unit.engine.model.random_adapters import LINEAR, save_random_adapter
from tests.unit.engine.model.random_models import VARIANTS, save_random_model
from tests.unit.engine.parallel.threads import divided
from tests.unit.engine.stepping import Run, allocate, finish, prompts, score

CASES = [
    ("llama-biases", 2), ("llama3-rope", 2), ("mistral-window", 3), ("qwen2-window", 2), ("qwen3-yarn", 2),
    ("gemma", 2), ("gemma2", 2), ("gemma3", 2), ("phi3-partial", 2), ("gpt2", 3), ("mixtral", 2),
    ("qwen3-moe-dense-layer", 2),
]  # fmt: skip
"""With norms, caps, windows, biases, tied heads and experts. The third rank's share of 96 tokens ends before the
others', and of one key head all have a copy."""
NAMES = [f"{variant}-{ranks}" for variant, ranks in CASES]


def runs() -> list[Run]:
    """Greedy ones, and the same prompts with a seed."""
    return [Run(prompt, temperature=t, seed=7 + i) for t in (0.0, 0.9) for i, prompt in enumerate(prompts())]


@pytest.mark.parametrize(("variant", "ranks"), CASES, ids=NAMES)
def test_tokens_are_those_of_one_rank(tmp_path: Path, variant: str, ranks: int) -> None:
    family, changes = VARIANTS[variant]
    if ranks == 3:
        changes = changes | {"intermediate_size": 78, "vocab_size": 97}
    _, path = save_random_model(tmp_path, family, **changes)
    config = EngineConfig(str(path), cache=tmp_path, dtype="float32", max_num_seqs=5)
    alone = TorchModel.load(config)
    allocate(alone)
    expected = finish(alone, runs(), 12, chunk=7)

    def load(group: Group) -> TorchModel:
        return TorchModel.load(config, group=group)

    with divided(tmp_path, ranks, load, allocate) as model:
        assert finish(model, runs(), 12, chunk=7) == expected
        assert model.kv_layout(16).kv_heads == max(1, alone.kv_layout(16).kv_heads // ranks)
        text = 3 * prompts()[5]
        for ours, theirs in zip(score(model, text, 33), score(alone, text, 33), strict=True):
            assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    alone.close()


@pytest.mark.parametrize(
    ("variant", "targets"),
    [("llama-biases", LINEAR), ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")), ("gpt2", ("c_attn",))],
)
def test_adapters_are_divided_as_their_matrices_are(tmp_path: Path, variant: str, targets: tuple[str, ...]) -> None:
    family, changes = VARIANTS[variant]
    base, path = save_random_model(tmp_path, family, **changes)
    adapters = {"all": tmp_path / "all", "one": tmp_path / "one"}
    save_random_adapter(adapters["all"], base, targets)
    save_random_adapter(adapters["one"], base, targets[:1], rank=2, seed=1)
    config = EngineConfig(str(path), cache=tmp_path, dtype="float32", max_num_seqs=5, adapters=adapters)

    def mixed() -> list[Run]:
        return [Run(prompt, adapter=i % 3) for i, prompt in enumerate(prompts() + prompts()[:1])]

    alone = TorchModel.load(config)
    allocate(alone)
    expected = finish(alone, mixed(), 12, chunk=7)
    assert expected != finish(alone, [Run(run.tokens) for run in mixed()], 12, chunk=7)

    def load(group: Group) -> TorchModel:
        return TorchModel.load(config, group=group)

    with divided(tmp_path, 2, load, allocate) as model:
        assert finish(model, mixed(), 12, chunk=7) == expected
    alone.close()
