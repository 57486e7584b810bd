"""Shared by all tests: everything small, on the CPU, from a fixed seed."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from cable_attn import CableBertConfig, CableGPTConfig

settings.register_profile("cable", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("cable")

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def small_gpt(encoding: str = "cable", **overrides: object) -> CableGPTConfig:
    return CableGPTConfig.preset("tiny", **{**SMALL, "encoding": encoding, **overrides})


def small_bert(encoding: str = "cable", **overrides: object) -> CableBertConfig:
    return CableBertConfig.preset("base", **{**SMALL, "encoding": encoding, "hidden_dropout": 0.0, **overrides})


def stir(model: torch.nn.Module) -> torch.nn.Module:
    """Move every parameter away from its start, where some encodings are still neutral and biases are 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
