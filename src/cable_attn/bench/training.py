"""``cable bench train``: tokens per second, use of the GPU and peak memory of every encoding, through ``cable train``.

Each cell is a process of its own, so that no cell pays for another's memory or compiled code. The first half of the
updates warms up; the median rate of the log lines of the second half counts.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cable_attn import recipe as recipes
from cable_attn.data.shards import Request, prepare
from cable_attn.data.sources import open_source
from cable_attn.data.tokenizers import find_tokenizer
from cable_attn.errors import CableError
from cable_attn.pretraining import make_config, plan

ENCODINGS = ("rope", "cable", "cable-nw", "alibi", "kerple-log", "t5", "fire", "learnable", "sinusoidal")
MATERIALISED = "cable-materialised"
"""As the authors' code does it: the bias as a T×T tensor."""
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""bf16 operations per second, dense."""


def run(sizes: list[str], encodings: list[str], steps: int, overrides: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each size and encoding; a cell that fails gives a row that says why."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        streams = open_source("embedded")
        prepare(data, Request("embedded", "bpe:2048"), streams, find_tokenizer("bpe:2048", streams["train"](0)))
        for size in sizes:
            for encoding in encodings:
                yield _cell(size, encoding, [f"path={data}", f"steps={steps}", *overrides], Path(folder))


def _cell(size: str, encoding: str, settings: list[str], folder: Path) -> dict[str, Any]:
    name = f"gpt2-{size}-wikitext103"
    model = {"model.encoding": encoding}
    if encoding == MATERIALISED:
        model = {"model.encoding": "cable", "model.overrides": '{attention_backend = "materialised"}'}
    settings = [
        *settings, *(f"{key}={value}" for key, value in model.items()),
        "report_to=none", "eval_every=1000000", "save_every=1000000", "log_every=5",
    ]  # fmt: skip
    chosen = recipes.load(name, settings)
    row: dict[str, Any] = {"bench": "training", "size": size, "encoding": encoding, "length": chosen.data.length}
    row |= {"micro_batch": chosen.train.micro_batch, "parameters": plan(chosen)["parameters"]}
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-m", "cable_attn", "train", name, *settings, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return row | _measured(done, out, chosen, row)
    finally:
        shutil.rmtree(out, ignore_errors=True)  # a checkpoint is gigabytes


def _measured(done: Any, out: Path, chosen: recipes.Recipe, row: dict[str, Any]) -> dict[str, Any]:
    if done.returncode:
        return {"error": (done.stderr.strip() or done.stdout.strip()).splitlines()[-1][-300:]}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = [line["tokens_per_second"] for line in lines if "loss" in line and line["step"] > chosen.train.steps / 2]
    if not rates:
        raise CableError(f"{chosen.train.steps} steps are too few to measure; give at least 20.")
    rate = statistics.median(rates)
    return {"tokens_per_second": rate, "peak_mib": lines[-1].get("peak_memory_mib"), "mfu": _mfu(chosen, row, rate)}


def _mfu(chosen: recipes.Recipe, row: dict[str, Any], rate: float) -> float | None:
    """The share of the GPU's peak: 6 operations a parameter and token, and causal attention."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for key, peak in PEAKS.items() if key in name), None)
    if peak is None:
        return None
    config = make_config(chosen)
    attention = 6 * config.num_hidden_layers * config.hidden_size * chosen.data.length
    return float(rate * (6 * row["parameters"] + attention) / peak)
