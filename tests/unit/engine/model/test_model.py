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
from tests.unit.engine.model.gguf_writing import model_metadata, model_tensors, tokenizer_metadata, write_gguf

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
        f"load_model(EngineConfig({str(gguf_path)!r}, cache=pathlib.Path({str(tmp_path)!r})))"
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
