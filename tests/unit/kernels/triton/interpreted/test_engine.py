"""The whole engine on interpreted kernels, as the setting `kernels` reaches them: the tokens of torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu import GpuModel
from engine.recording import HostRecorder
from engine.request import EngineRequest
from engine.runner import TorchModel
from kernels.triton.kernels import TritonKernels
from tests.unit.engine.model.random_adapters import save_random_adapter
from tests.unit.engine.model.random_models import save_random_model
from tests.unit.engine.model.rounded_models import save_rounded

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_seq_len": 32, "max_num_seqs": 4, "kv_cache_bytes": 2**22,
    "warm_up": False,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_give_the_tokens_of_weights_that_were_rounded_before(
    tmp_path: Path, quantization: str
) -> None:
    _, path = save_random_model(tmp_path, "Qwen3", **SIZES)
    with LLM(path, tmp_path, kernels="triton", quantization=quantization, **CONFIG) as llm:
        model = llm._engine._model
        assert isinstance(model, TorchModel)
        assert isinstance(model._open().kernels, TritonKernels)
        found = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    rounded = save_rounded(path, 8 if quantization == "int8" else 4)
    with LLM(rounded, tmp_path, kernels="torch", **CONFIG) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == found


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")
def test_recorded_steps_give_each_request_its_own_adapter(tmp_path: Path) -> None:
    base, path = save_random_model(tmp_path, "Qwen3", **SIZES)
    adapters = {name: tmp_path / name for name in ("one", "two")}
    save_random_adapter(adapters["one"], base, rank=3, seed=1)
    save_random_adapter(adapters["two"], base, ("v_proj", "up_proj"), rank=5, seed=2)
    said = []
    for kernels in ("torch", "triton"):
        config = EngineConfig(str(path), tmp_path, adapters=adapters, kernels=kernels, **CONFIG)
        model = TorchModel.load(config) if kernels == "torch" else GpuModel.load(config, recorder=HostRecorder())
        engine = Engine(model, config)
        for number, adapter in enumerate((None, "one", "two")):
            engine.add(EngineRequest(str(number), PARAMS, tuple(PROMPTS[0]), adapter=adapter))
        outputs: dict[str, tuple[int, ...]] = {}
        while engine.has_work:
            outputs.update({output.request_id: output.token_ids for output in engine.step().finished})
        engine.close()
        said.append(outputs)
    assert said[0] == said[1]
    assert len(set(said[0].values())) == 3
