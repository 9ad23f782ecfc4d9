# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors for the conformance suite, which itself knows NumPy only."""

from __future__ import annotations

from typing import Any

import numpy
import torch


class TorchTensors:
    """CPU tensors; bfloat16 is stored as uint16."""

    name = "torch"
    device = "cpu"
    stream = None

    def for_rank(self, rank: int) -> TorchTensors:
        """Return itself: there is no state."""
        return self

    def write(self, tensor: Any, stored: numpy.ndarray) -> None:
        """Copy the values."""
        self.to_array(tensor)[...] = stored

    def wait(self) -> None:
        """Return: calls on the CPU have ended when they return."""

    def to_tensor(self, stored: numpy.ndarray, dtype: str) -> torch.Tensor:
        """Return a tensor that shares the array's memory."""
        tensor = torch.from_numpy(stored)
        return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor

    def to_array(self, tensor: Any) -> numpy.ndarray:
        """Return an array that shares the tensor's memory."""
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.uint16).numpy()
        return tensor.numpy()
