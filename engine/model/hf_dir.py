"""Models in a Hugging Face directory: configuration, safetensors, tokenizer.json. Never pickle, never remote code."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.model.families import family_of, spec_from_hf
from engine.model.hf_names import Checkpoint, Names, Place
from engine.model.pooling_files import MODULES, read_pooling
from engine.model.safetensors_file import SafetensorsFile
from engine.model.spec import ForeignModel, ModelSpec, UnsupportedModel
from engine.model.weights import StoredTensor
from engine.pooling import Pooling
from text.bundle import TextBundle

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
logger = logging.getLogger(__name__)


class HFDirectory:
    """A model's directory as `save_pretrained` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def spec(self) -> ModelSpec:
        try:
            spec = spec_from_hf(self.config)
        except UnsupportedModel:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UnsupportedModel(f"{self.path / 'config.json'} lacks what its architecture needs: {error}") from error
        return replace(spec, tied_head=self._is_tied(spec))

    def _is_tied(self, spec: ModelSpec) -> bool:
        """Whether the embedding is the head: the file's own head goes before what the configuration says, as in
        `transformers` 5.
        """
        checkpoint = Checkpoint(self.names, spec, self.tensor_files)
        head, embedding = (self._tensor(checkpoint.place(name)) for name in ("head", "embedding"))
        if head is None:
            return True
        if not spec.tied_head or embedding is None:
            return spec.tied_head
        is_same = head.kind == embedding.kind and np.array_equal(head.data, embedding.data)
        if not is_same:
            logger.warning("%s says that the head is the embedding, but has another one, which serves", self.path)
        return is_same

    def _tensor(self, place: Place | None) -> StoredTensor | None:
        """A whole tensor, if there is one."""
        file = self.tensor_files.get(place.name) if place else None
        return SafetensorsFile(file)[place.name] if place and file else None

    @property
    def names(self) -> Names:
        """The names that its family has for its parts. Raises `ForeignModel` if it is of none."""
        return family_of(self.config).names

    @cached_property
    def pooling(self) -> Pooling | None:
        """How the model makes a vector of a text; None if it isn't made for that."""
        return read_pooling(self.path)

    @property
    def generates(self) -> bool:
        """Whether the model has a head that chooses tokens."""
        return not any(
            name.endswith("Model") and not name.endswith("LMHeadModel") for name in self.config["architectures"]
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding; of foreign models too."""
        return self._size("vocab_rows", "vocab_size")

    @property
    def context_len(self) -> int:
        """Tokens that the model was made for; of foreign models too."""
        return self._size("context_len", "max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")

    def _size(self, field: str, *names: str) -> int:
        """A field of the structure, or what a foreign configuration has under one of these names."""
        try:
            return int(getattr(self.spec, field))
        except ForeignModel:
            config = self.config | self.config.get("text_config", {})
            sizes = [config[name] for name in names if isinstance(config.get(name), int)]
            if not sizes:
                raise UnsupportedModel(f"{self.path / 'config.json'} says none of {', '.join(names)}") from None
            return int(sizes[0])

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`."""
        config: dict[str, Any] = self._json("config.json")
        return config

    @cached_property
    def text(self) -> TextBundle:
        tokenizer = self.path / "tokenizer.json"
        if not tokenizer.is_file():
            raise UnsupportedModel(f"{self.path} has no tokenizer.json; other tokenizer files are not read")
        return text_from_hf(
            tokenizer.read_text(encoding="utf-8", errors="replace"),
            tokenizer_config=self._json("tokenizer_config.json", {}),
            eos=_ids(self._json("generation_config.json", {}), self._json("config.json")),
            chat_template=self._chat_template(),
            vocab_rows=self.vocab_rows,
        )

    @cached_property
    def tensor_files(self) -> dict[str, Path]:
        """The file of each tensor, by its name in the files."""
        if (self.path / INDEX).is_file():
            shards: dict[str, str] = self._json(INDEX)["weight_map"]
            outside = [file for file in shards.values() if Path(file).name != file or not file.endswith(".safetensors")]
            if outside:
                raise UnsupportedModel(f"{self.path / INDEX} names {outside[0]!r}: no safetensors of its own directory")
            return {name: self.path / file for name, file in shards.items()}
        single = self.path / _SINGLE
        if not single.is_file():
            pickled = any(self.path.glob("*.bin")) or any(self.path.glob("*.pt"))
            raise UnsupportedModel(
                f"{self.path} has no {_SINGLE} and no {INDEX}."
                + (" Its .bin/.pt files are pickles, which can run code when read; convert them." if pickled else "")
            )
        return dict.fromkeys(SafetensorsFile(single).names, single)

    @property
    def files(self) -> list[Path]:
        """All files that decide what the model does."""
        names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
        small = [self.path / name for name in (*names, "chat_template.jinja")]
        small += [self.path / MODULES, *self.path.glob("*_Pooling/config.json")]
        return [file for file in small if file.is_file()] + sorted(set(self.tensor_files.values()))

    def _json(self, name: str, default: Any = None) -> Any:
        path = self.path / name
        if default is not None and not path.is_file():
            return default
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnsupportedModel(f"{path} is not readable as JSON: {error}") from error

    def _chat_template(self) -> str | None:
        """The file wins over the entry in `tokenizer_config.json`, and there `default` over the other names."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._json("tokenizer_config.json", {}).get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template if isinstance(template, str) else None


class HFWeights:
    """`engine.model.weights.Weights` over a directory's safetensors."""

    def __init__(self, directory: HFDirectory) -> None:
        self._files = directory.tensor_files
        self._open = lru_cache(maxsize=None)(SafetensorsFile)
        self._checkpoint = Checkpoint(directory.names, directory.spec, self._files)

    def __contains__(self, name: object) -> bool:
        place = self._checkpoint.place(name) if isinstance(name, str) else None
        return place is not None and place.name in self._files

    def __getitem__(self, name: str) -> StoredTensor:
        place = self._checkpoint.place(name)
        if place is None:
            raise KeyError(name)
        tensor = self._open(self._files[place.name])[place.name]
        tensor = tensor.transposed() if place.transposed else tensor
        return tensor.some_rows(place.rows) if place.rows is not None else tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self[name].shape  # a view of the file


def text_from_hf(
    tokenizer_json: str,
    *,
    tokenizer_config: Mapping[str, Any],
    eos: set[int],
    chat_template: str | None,
    vocab_rows: int,
) -> TextBundle:
    """Resolve special tokens and ends once."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises nothing more particular
        raise UnsupportedModel(f"the model's tokenizer.json is not readable: {error}") from error
    bos, end = (_content(tokenizer_config.get(f"{name}_token")) for name in ("bos", "eos"))
    if end is not None and (end_id := tokenizer.token_to_id(end)) is not None:
        eos = eos | {end_id}
    first = tokenizer.encode("a", add_special_tokens=True).ids[:1]
    return TextBundle(
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        bos_token=bos,
        eos_token=end,
        eos_token_ids=tuple(sorted(eos)),
        add_bos=bos is not None and first == [tokenizer.token_to_id(bos)],
        vocab_size=min(vocab_rows, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1),
    )


def _content(token: Any) -> str | None:
    """A special token, which is stored as text or as an object."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _ids(generation_config: Mapping[str, Any], config: Mapping[str, Any]) -> set[int]:
    """`eos_token_id` of the generation config, or else of the model's; a number, a list or nothing."""
    eos = generation_config.get("eos_token_id", config.get("eos_token_id"))
    if eos is None:
        return set()
    try:
        return {int(token) for token in (eos if isinstance(eos, list) else [eos])}
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(f"eos_token_id is {eos!r}, and no list of token ids") from error
