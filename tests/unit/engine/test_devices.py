"""Which device and which type a model gets, and what a device is refused for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.devices import check_kv_dtype, check_max_num_seqs, choose_device, choose_dtype

GPU = torch.device("cuda")


def test_auto_is_a_type_that_the_cpu_is_fast_at() -> None:
    native = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert choose_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if native else torch.float32)


def test_a_gpu_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ValueError, match="no usable GPU"):
        choose_device("cuda")


def test_an_old_gpu_is_told_what_to_take_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    check_kv_dtype(EngineConfig("m", kv_cache_dtype="int8"), GPU)
    with pytest.raises(ValueError, match=r"has 8\.6: set kv_cache_dtype to int8"):
        check_kv_dtype(EngineConfig("m", kv_cache_dtype="fp8"), GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_kv_dtype(EngineConfig("m", kv_cache_dtype="fp8"), GPU)


def test_no_more_sequences_than_a_gpu_computes_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    check_max_num_seqs(528, GPU)
    check_max_num_seqs(529, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"max_num_seqs is 529, and a GPU with 132 .* runs 528 at most .* lower it"):
        check_max_num_seqs(529, GPU)
