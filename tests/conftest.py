"""Shared by all tests: everything small, on the CPU, from a fixed seed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

from cable_attn import CableBertConfig, CableGPTConfig
from cable_attn.attention import fused
from cable_attn.data.shards import Request, prepare
from cable_attn.data.sources import open_source
from cable_attn.data.tokenizers import find_tokenizer

settings.register_profile("cable", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("cable")

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _prune_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FEW_SCORES", 0)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few tokens of each split of the embedded corpus."""
    folder = tmp_path_factory.mktemp("shards") / "embedded"
    streams = open_source("embedded")
    tokenizer = find_tokenizer("bpe:300", streams["test"](0))
    prepare(folder, Request("embedded", "bpe:300", tokens=3000), streams, tokenizer)
    return folder


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
