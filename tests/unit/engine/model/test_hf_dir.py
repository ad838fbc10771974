from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.digest import revision_of
from engine.model.hf_dir import INDEX, HFDirectory, HFWeights
from engine.model.spec import UnsupportedModel
from engine.model.tensors import to_torch

Save = Callable[..., tuple[Any, Path]]


@pytest.fixture
def path(save_random: Save) -> Path:
    _, path = save_random("Llama", tie_word_embeddings=True)
    return path


def write(path: Path, name: str, value: Any) -> None:
    (path / name).write_text(json.dumps(value))


def test_text_of_a_plain_directory(path: Path) -> None:
    text = HFDirectory(path).text
    assert (text.bos_token, text.eos_token, text.eos_token_ids) == ("<1>", "<2>", (2,))
    assert (text.vocab_size, text.add_bos, text.chat_template) == (96, False, None)


class TestEnds:
    def test_all_of_the_generation_config_and_the_tokenizer_own(self, path: Path) -> None:
        write(path, "generation_config.json", {"eos_token_id": [7, 5]})
        assert HFDirectory(path).text.eos_token_ids == (2, 5, 7)

    def test_the_model_config_counts_if_there_is_no_generation_config(self, path: Path) -> None:
        (path / "generation_config.json").unlink()
        config = json.loads((path / "config.json").read_text())
        write(path, "config.json", config | {"eos_token_id": [9]})
        assert HFDirectory(path).text.eos_token_ids == (2, 9)

    def test_a_token_object(self, path: Path) -> None:
        write(path, "tokenizer_config.json", {"eos_token": {"content": "<4>", "lstrip": False}, "bos_token": None})
        text = HFDirectory(path).text
        assert (text.eos_token, text.eos_token_ids, text.bos_token) == ("<4>", (2, 4), None)


class TestBos:
    def test_it_is_added_if_the_tokenizer_itself_adds_it(self, path: Path) -> None:
        from tokenizers import Tokenizer
        from tokenizers.processors import TemplateProcessing

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.post_processor = TemplateProcessing(single="<1> $A", special_tokens=[("<1>", 1)])
        tokenizer.save(str(path / "tokenizer.json"))
        assert HFDirectory(path).text.add_bos


class TestTemplate:
    def test_the_file_wins(self, path: Path) -> None:
        write(path, "tokenizer_config.json", {"chat_template": "old"})
        assert HFDirectory(path).text.chat_template == "old"
        (path / "chat_template.jinja").write_text("{{ messages }}")
        assert HFDirectory(path).text.chat_template == "{{ messages }}"

    def test_the_default_of_several(self, path: Path) -> None:
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        write(path, "tokenizer_config.json", {"chat_template": named})
        assert HFDirectory(path).text.chat_template == "d"


class TestVocabulary:
    def test_rows_without_a_token_are_not_part_of_it(self, save_random: Save) -> None:
        _, path = save_random("Qwen2", vocab_size=128)
        directory = HFDirectory(path)
        assert (directory.spec.vocab_rows, directory.text.vocab_size) == (128, 96)

    def test_tokens_without_a_row_are_not_part_of_it(self, save_random: Save) -> None:
        _, path = save_random("Qwen2", vocab_size=90)
        assert HFDirectory(path).text.vocab_size == 90


class TestTensors:
    def test_shards_hold_the_same_as_one_file(self, save_random: Save) -> None:
        model, path = save_random("Qwen2", max_shard_size="50KB")
        assert (path / INDEX).is_file()
        weights = HFWeights(HFDirectory(path))
        state = model.state_dict()
        assert torch.equal(to_torch(weights["2.down"]), state["model.layers.2.mlp.down_proj.weight"])
        assert torch.equal(to_torch(weights["0.k.bias"]), state["model.layers.0.self_attn.k_proj.bias"])
        assert torch.equal(to_torch(weights["embedding"]), state["model.embed_tokens.weight"])
        assert "head" in weights
        assert "rope_factors" not in weights

    def test_a_missing_head_is_tied_whatever_the_config_says(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        write(path, "config.json", config | {"tie_word_embeddings": False})
        assert HFDirectory(path).spec.tied_head

    @pytest.mark.parametrize("is_same", [True, False])
    def test_the_files_own_head_goes_before_what_the_config_says(
        self, save_random: Save, caplog: pytest.LogCaptureFixture, is_same: bool
    ) -> None:
        model, path = save_random("Llama")
        if is_same:
            with torch.no_grad():
                model.lm_head.weight.copy_(model.model.embed_tokens.weight)
            model.save_pretrained(path)
        config = json.loads((path / "config.json").read_text())
        write(path, "config.json", config | {"tie_word_embeddings": True})
        assert HFDirectory(path).spec.tied_head is is_same
        assert ("has another one" in caplog.text) is not is_same

    def test_pickles_are_refused_by_name(self, path: Path) -> None:
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        with pytest.raises(UnsupportedModel, match="pickles, which can run code"):
            _ = HFDirectory(path).tensor_files

    def test_nothing_at_all(self, path: Path) -> None:
        (path / "model.safetensors").unlink()
        with pytest.raises(UnsupportedModel, match=r"no model\.safetensors and no model\.safetensors\.index\.json\.$"):
            _ = HFDirectory(path).tensor_files

    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"nonsense"])
    def test_a_damaged_file_is_named(self, path: Path, name: str, content: bytes) -> None:
        (path / name).write_bytes(content)
        with pytest.raises(UnsupportedModel, match=re.escape(name)):
            _ = HFDirectory(path).text

    def test_no_tokenizer(self, path: Path) -> None:
        (path / "tokenizer.json").unlink()
        with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
            _ = HFDirectory(path).text


@pytest.mark.parametrize(
    "change",
    [
        lambda p: (p / "chat_template.jinja").write_text("new"),
        lambda p: (p / "generation_config.json").write_text('{"eos_token_id": 3}'),
        lambda p: (p / "tokenizer.json").write_text((p / "tokenizer.json").read_text() + " "),
        lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:-1] + b"\x01"),
    ],
    ids=["template", "ends", "tokenizer", "weights"],
)
def test_the_revision_follows_every_file(path: Path, tmp_path: Path, change: Callable[[Path], Any]) -> None:
    cache = tmp_path / "cache"
    before = revision_of(HFDirectory(path).files, cache)
    assert revision_of(HFDirectory(path).files, cache) == before
    change(path)
    assert revision_of(HFDirectory(path).files, cache) != before
