"""From a name to a model: the package's own functions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.model import load_model, load_text
from engine.model.spec import UnsupportedModel
from kernels.cpu.library import Unavailable
from tests.unit.engine.model.gguf_writing import model_metadata, model_tensors, tokenizer_metadata, write_gguf
from tests.unit.kernels.isas import needs_library

Save = Callable[..., tuple[Any, Path]]


@pytest.fixture
def gguf_path(save_random: Save, tmp_path: Path) -> Path:
    model, _ = save_random("Llama", vocab_size=12)
    tensors = model_tensors(model.state_dict(), model.config, "llama")
    metadata = model_metadata(model.config, "llama") | tokenizer_metadata()
    return write_gguf(tmp_path / "m.gguf", tensors, "llama", **metadata)


def test_importing_it_and_reading_a_text_side_needs_no_torch(gguf_path: Path, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from engine.config import EngineConfig; import engine.model.catalog, engine.model.spec\n"
        "from engine.model import load_text\n"
        f"config = EngineConfig({str(gguf_path)!r}, cache=pathlib.Path({str(tmp_path)!r}))\n"
        "text, revision, context = load_text(config)\n"
        "assert (text.vocab_size, len(revision), context) == (12, 16, 512)\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@needs_library
def test_a_model_on_the_cpu_runs_without_torch(gguf_path: Path, tmp_path: Path) -> None:
    """Importing torch takes longer than all the rest of a start."""
    code = (
        "import sys, pathlib; from engine import LLM, SamplingParams\n"
        f"with LLM({str(gguf_path)!r}, device='cpu', cache=pathlib.Path({str(tmp_path)!r}), max_seq_len=64) as llm:\n"
        "    params = SamplingParams(max_tokens=3, temperature=0.7, ignore_eos=True, logprobs=1)\n"
        "    assert len(llm.generate([5, 6, 7], params)[0].token_ids) == 3\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestWithoutTheLibrary:
    @pytest.fixture(autouse=True)
    def _missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(isa: str | None = None) -> Any:
            raise Unavailable("it was not built")

        monkeypatch.setattr("engine.cpu.model.load", missing)

    def test_torch_serves_and_the_log_says_why(
        self, gguf_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = load_model(EngineConfig(str(gguf_path), cache=tmp_path, device="cpu"))
        assert type(model).__name__ == "TorchModel"
        assert "torch serves" in caplog.text
        assert "it was not built" in caplog.text
        model.close()

    def test_so_it_does_with_quantised_weights(self, save_random: Save, tmp_path: Path) -> None:
        _, path = save_random("Llama", hidden_size=64, intermediate_size=64, num_attention_heads=4)
        model = load_model(EngineConfig(str(path), cache=tmp_path, device="cpu", quantization="int8"))
        assert (type(model).__name__, model.info.dtype) == ("TorchModel", "int8")
        model.close()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"dtype": "float16"}, "float16 is asked for"),
        ({"page_size": 8}, "page_size is 8"),
        ({"kernels": "torch"}, "kernels is torch"),
    ],
)
def test_what_the_library_has_not_torch_serves(
    gguf_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], why: str
) -> None:
    model = load_model(EngineConfig(str(gguf_path), cache=tmp_path, device="cpu", **config))
    assert type(model).__name__ == "TorchModel"
    assert why in caplog.text
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "GOMP_SPINCOUNT = '1000'"),
        ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT = '77'"),
        ({"OMP_WAIT_POLICY": "passive"}, "GOMP_SPINCOUNT = '0'"),
    ],
    ids=["ours", "count", "policy"],
)
def test_openmp_threads_spin_briefly_unless_the_user_says_otherwise(
    gguf_path: Path, tmp_path: Path, own: dict[str, str], expected: str
) -> None:
    """OpenMP itself is asked, which reads its environment when torch loads it."""
    code = (
        "import pathlib; from engine.config import EngineConfig; from engine.model import load_model\n"
        f"load_model(EngineConfig({str(gguf_path)!r}, dtype='float16', cache=pathlib.Path({str(tmp_path)!r})))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    environment |= own | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, timeout=60, capture_output=True, text=True
    )
    assert expected in done.stderr


def test_text_and_model_agree(gguf_path: Path, tmp_path: Path) -> None:
    config = EngineConfig(str(gguf_path), cache=tmp_path, dtype="float32")
    text, revision, context_len = load_text(config)
    model = load_model(config)
    assert (model.info.text, model.info.revision, model.info.context_len) == (text, revision, context_len)
    model.close()


def test_the_fake_model_needs_no_files(tmp_path: Path) -> None:
    config = EngineConfig("fake:context_len=512", cache=tmp_path)
    text, revision, context_len = load_text(config)
    info = load_model(config).info
    assert (info.text, info.revision, info.context_len, context_len) == (text, revision, context_len, 512)


def test_an_unsupported_directory_is_refused_before_its_weights_are_read(save_random: Save, tmp_path: Path) -> None:
    _, path = save_random("Llama")
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("LlamaForCausalLM", "MambaForCausalLM"))
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        load_model(EngineConfig(str(path), cache=tmp_path))
