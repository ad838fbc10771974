"""A file's tensors as torch has them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.model.weights import StoredTensor


def to_torch(stored: StoredTensor) -> Tensor:
    """Elements in the file's own type, blocks as float32."""
    if stored.kind == "BF16":
        return torch.from_numpy(stored.data.view(np.int16).copy()).view(torch.bfloat16)
    if stored.kind == "F16":
        return torch.from_numpy(stored.data.copy())
    return torch.from_numpy(stored.float32())
