"""All sides, with the settings at which each is at its best."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import llama, vllm
from bench.peers.place import HOME, ROOT
from bench.side import SideSpec

GIB = 2**30
KV_POOL_BYTES = 448 * 2**20
"""A little more than all requests of a workload hold at their longest."""
VLLM_KV_POOL_BYTES = 2 * GIB
"""vLLM's setting takes whole GiB; this is the one that its best figures were found with."""
MAX_SEQS = 64
MAX_SEQ_TOKENS = 1024
LLAMA_SLOT_TOKENS = 768
"""A slot's context holds the longest request: prefix, prompt and output are 640 tokens at most."""
PRECISIONS = {"bf16": "none", "int8": "int8", "gguf": "gguf"}
"""Headrace's sides, and the `quantization` of each."""
UNGUESSED = "-unguessed"
"""Without what `engine.speculation` does: the others have nothing of the kind switched on."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model in its two forms."""

    name: str
    gguf: Path
    directory: Path
    """In bfloat16, for `transformers` and vLLM."""
    parameters: int
    """Without a tied head's second use."""
    kv_bytes_per_token: int


class Roster:
    """Makes the specifications of sides; says why a peer can't take part."""

    def __init__(self, model: Model, threads: int, import_root: Path) -> None:
        self._model = model
        self._threads = threads
        self._path = import_root

    def headrace(self, precision: str, suffix: str = "", **config: Any) -> SideSpec:
        """Headrace with the weights of one of `PRECISIONS`; `config` changes the engine's settings."""
        settings: dict[str, Any] = {
            "model": self._model.name,
            "quantization": PRECISIONS[precision],
            "dtype": "bfloat16",
            "max_num_seqs": MAX_SEQS,
            "max_seq_len": MAX_SEQ_TOKENS,
            "kv_cache_bytes": KV_POOL_BYTES,
        }
        settings |= config
        unguessed = ", no token guessed ahead" if settings.get("num_speculative_tokens") == 0 else ""
        weights = {"bf16": 2 * self._model.parameters, "int8": self._model.parameters}
        return self._spec(
            f"headrace-{precision}{suffix}",
            f"Headrace, {precision.replace('gguf', 'the GGUF file as it is (4 bit)')}{unguessed}",
            "headrace",
            {"config": settings},
            precision="bf16" if precision == "bf16" else "int8",
            weights_bytes=weights.get(precision, self._model.gguf.stat().st_size),
            need_bytes=3 * GIB,
            env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])},
            kv_pool_bytes=settings["kv_cache_bytes"],
        )

    def vllm(self) -> SideSpec:
        python = vllm.interpreter()
        assert python is not None
        cpus = f"0-{self._threads - 1}"
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_POOL_BYTES // GIB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(HOME / "vllm-cache"),
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join(map(str, vllm.preloads())),
        }
        settings = {"dtype": "bfloat16", "max_model_len": MAX_SEQ_TOKENS, "max_num_seqs": MAX_SEQS}
        return self._spec(
            "vllm-bf16",
            "vLLM's CPU build, bf16",
            "vllm",
            {"model": str(self._model.directory), "settings": settings},
            precision="bf16",
            weights_bytes=2 * self._model.parameters,
            need_bytes=6 * GIB,
            python=python,
            env=env,
            kv_pool_bytes=VLLM_KV_POOL_BYTES,
        )

    def llama(self, kind: str, slots: int = MAX_SEQS) -> SideSpec:
        file = llama.model_file(kind)
        precision = "bf16" if kind == "BF16" else "int8"
        many = "" if slots > 1 else "-single"
        slot_tokens = LLAMA_SLOT_TOKENS if slots > 1 else MAX_SEQ_TOKENS
        return self._spec(
            f"llamacpp-{kind.lower()}{many}",
            f"llama.cpp's server, {kind.replace('BF16', 'bf16')}, {slots} slot{'s' * (slots > 1)}",
            "llama",
            {
                "program": str(llama.server()),
                "version": f"b{llama.VERSION}",
                "model": str(file),
                "saves": str(llama.MODELS),
                "slots": slots,
                "slot_tokens": slot_tokens,
            },
            precision=precision,
            weights_bytes=file.stat().st_size,
            need_bytes=4 * GIB if slots > 1 else GIB,
            kv_pool_bytes=slots * slot_tokens * self._model.kv_bytes_per_token,
        )

    def transformers(self, batch: int) -> SideSpec:
        how = "one prompt at a time" if batch == 1 else f"static batches of {batch}"
        return self._spec(
            f"transformers-{batch}",
            f"`transformers`, bf16, {how}",
            "transformers",
            {"model": str(self._model.directory), "batch": batch},
            precision="bf16",
            weights_bytes=2 * self._model.parameters,
            need_bytes=2 * GIB,
            most_prompts=4 if batch == 1 else None,
        )

    def throughput(self) -> list[SideSpec]:
        """Who takes part in W1 and W2: offline work, so prompts may take whole steps, as with `LLM`."""
        sides = [self.headrace(precision, prefill_share=1.0) for precision in PRECISIONS]
        sides.append(self.headrace("bf16", UNGUESSED, prefill_share=1.0, num_speculative_tokens=0))
        if vllm.interpreter() is not None:
            sides.append(self.vllm())
        if not llama.missing():
            sides += [self.llama("BF16"), self.llama("Q4_0")]
        return [*sides, self.transformers(32), self.transformers(1)]

    def latency(self) -> list[SideSpec]:
        """Who takes part in W3: llama.cpp with the one slot that serves one request best."""
        sides = [self.headrace(precision) for precision in PRECISIONS]
        sides += [self.headrace(precision, UNGUESSED, num_speculative_tokens=0) for precision in ("bf16", "gguf")]
        if vllm.interpreter() is not None:
            sides.append(self.vllm())
        if not llama.missing():
            sides += [self.llama("BF16", slots=1), self.llama("Q4_0", slots=1)]
        return [*sides, self.transformers(1)]

    def servers(self) -> list[SideSpec]:
        """Who takes requests while others run."""
        sides = [self.headrace("bf16"), self.headrace("int8")]
        if vllm.interpreter() is not None:
            sides.append(self.vllm())
        if not llama.missing():
            sides.append(self.llama("BF16"))
        return sides

    def _spec(
        self,
        name: str,
        title: str,
        module: str,
        options: Mapping[str, Any],
        python: Path | None = None,
        env: Mapping[str, str] | None = None,
        **rest: Any,
    ) -> SideSpec:
        return SideSpec(
            name=name,
            title=title,
            module=module,
            python=python or Path(sys.executable),
            options={**options, "threads": self._threads},
            env={"PYTHONPATH": str(self._path), **(env or {})},
            **rest,
        )


def chosen(specs: Sequence[SideSpec], wanted: Sequence[str]) -> list[SideSpec]:
    """The sides whose names begin with one of `wanted`; all if nothing is."""
    return [spec for spec in specs if not wanted or spec.name.startswith(tuple(wanted))]
