"""``cable bench train``: tokens per second, use of the GPU and peak memory of every encoding, through ``cable train``.

Each cell is a process of its own, so that no cell pays for another's memory or compiled code. The first half of the
updates warms up; the median rate of the log lines after it counts. Several cells may start and compile at the same time
(``jobs``): the one whose turn it is to be measured has the machine for itself, the others are stopped meanwhile.
"""

from __future__ import annotations

import shutil
import statistics
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
from cable_attn.jobs import Process, in_turn
from cable_attn.pretraining import make_config, plan
from cable_attn.training import read_metrics

ENCODINGS = ("rope", "cable", "cable-nw", "alibi", "kerple-log", "t5", "fire", "learnable", "sinusoidal")
MATERIALISED = "cable-materialised"
"""As the authors' code does it: the bias as a T×T tensor."""
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""bf16 operations per second, dense."""


LOG_EVERY = 5


def run(
    sizes: list[str], encodings: list[str], steps: int, overrides: list[str], jobs: int
) -> Iterator[dict[str, Any]]:
    """A row for each size and encoding; a cell that fails gives a row that says why."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        streams = open_source("embedded")
        prepare(data, Request("embedded", "bpe:2048"), streams, find_tokenizer("bpe:2048", streams["train"](0)))
        settings = [f"path={data}", f"steps={steps}", *overrides]
        cells = [_Cell(size, encoding, settings, Path(folder)) for size in sizes for encoding in encodings]
        for cell in in_turn(cells, jobs):
            yield cell.row()


class _Cell(Process):
    """A run of ``cable train`` and what it has logged."""

    def __init__(self, size: str, encoding: str, settings: list[str], folder: Path):
        model = {"model.encoding": encoding}
        if encoding == MATERIALISED:
            model = {"model.encoding": "cable", "model.overrides": '{attention_backend = "materialised"}'}
        fixed = ["report_to=none", "eval_every=1000000", "save_every=1000000", f"log_every={LOG_EVERY}"]
        self.settings = [*settings, *(f"{key}={value}" for key, value in model.items()), *fixed]
        self.name = f"gpt2-{size}-wikitext103"
        self.chosen = recipes.load(self.name, self.settings)
        self.about: dict[str, Any] = {"bench": "training", "size": size, "encoding": encoding}
        self.about |= {"length": self.chosen.data.length, "micro_batch": self.chosen.train.micro_batch}
        self.about |= {"parameters": plan(self.chosen)["parameters"]}
        self.out = Path(tempfile.mkdtemp(dir=folder))
        self.begun: int | None = None

    def start(self, alone: bool) -> None:
        if alone:
            self.begun = self.chosen.train.steps // 2 - LOG_EVERY
        train = [sys.executable, "-m", "cable_attn", "train", self.name, *self.settings]
        self.open([*train, "--out", str(self.out / "run")], self.out / "log")

    def lines(self) -> list[dict[str, Any]]:
        path = self.out / "run" / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    @property
    def logged(self) -> int:
        return max((line["step"] for line in self.lines() if "loss" in line), default=0)

    @property
    def warm(self) -> bool:
        return self.begun is None and self.logged >= self.chosen.train.steps / 2 - LOG_EVERY

    def begin(self) -> None:
        """From now on it is alone; others may have disturbed it until the end of the log line it is in."""
        self.begun = self.logged

    @property
    def measured(self) -> bool:
        return self.logged >= self.chosen.train.steps

    def row(self) -> dict[str, Any]:
        try:
            return self.about | self._measured()
        finally:
            shutil.rmtree(self.out, ignore_errors=True)  # a checkpoint is gigabytes

    def _measured(self) -> dict[str, Any]:
        if self.process.returncode:
            return {"error": self.failure}
        lines = self.lines()
        alone = self.chosen.train.steps if self.begun is None else self.begun + LOG_EVERY
        rates = [line["tokens_per_second"] for line in lines if "loss" in line and line["step"] > alone]
        if not rates:
            return {"error": "the steps went by before it was alone; give more steps, or --jobs 1"}
        rate = statistics.median(rates)
        return {
            "tokens_per_second": rate, "peak_mib": lines[-1].get("peak_memory_mib"),
            "mfu": _mfu(self.chosen, self.about, rate),
        }  # fmt: skip


def _mfu(chosen: recipes.Recipe, row: dict[str, Any], rate: float) -> float | None:
    """The share of the GPU's peak: 6 operations a parameter and token, and causal attention."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for key, peak in PEAKS.items() if key in name), None)
    if peak is None:
        return None
    config = make_config(chosen)
    attention = 6 * config.num_hidden_layers * config.hidden_size * chosen.data.length
    return float(rate * (6 * row["parameters"] + attention) / peak)
