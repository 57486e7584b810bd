"""What depends on the device."""

from __future__ import annotations

import importlib.util
import os
from contextlib import nullcontext
from typing import Any

import torch

from cable_attn.errors import CableError

TRITON = importlib.util.find_spec("triton") is not None


def best_device() -> Any:
    """Where models run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_gpu(what: str) -> None:
    if not torch.cuda.is_available():
        raise CableError(f"{what} needs an NVIDIA GPU, and none is to be seen.")


def has_bf16() -> bool:
    """On a GPU that computes in bfloat16 by itself."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def interpreting() -> bool:
    """Triton's kernels run on the CPU, slowly: for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def kernels_run_on(device: torch.device) -> bool:
    return TRITON and (device.type == "cuda" or interpreting())


def widest(device: torch.device) -> torch.dtype:
    """float64, except on Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def current(device: torch.device) -> Any:
    """Triton's kernels start on the current device, which may not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
