"""Which device a model runs on, in which type, and what that device can't do."""

from __future__ import annotations

import torch

from engine.config import EngineConfig

FP8_CAPABILITY = (8, 9)
"""NVIDIA's compute capability from which on there are conversions of float8."""
SEQUENCES_PER_MULTIPROCESSOR = 4


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but this machine has no usable GPU")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it natively, else float32."""
    if name == "auto":
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            native = torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name]


def check_kv_dtype(config: EngineConfig, device: torch.device) -> None:
    """Raise ValueError if `device` can't keep keys and values as `config` asks."""
    if config.kv_cache_dtype != "fp8" or device.type != "cuda" or torch.version.hip is not None:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FP8_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or newer, this one has {major}.{minor}:"
            " set kv_cache_dtype to int8, which takes as little memory"
        )


def check_max_num_seqs(max_num_seqs: int, device: torch.device) -> None:
    """Raise ValueError for more sequences than a GPU computes side by side."""
    if device.type != "cuda":
        return
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    most = SEQUENCES_PER_MULTIPROCESSOR * multiprocessors
    if max_num_seqs > most:
        raise ValueError(
            f"max_num_seqs is {max_num_seqs}, and a GPU with {multiprocessors} multiprocessors runs {most} at most "
            f"({SEQUENCES_PER_MULTIPROCESSOR} for each): lower it"
        )
