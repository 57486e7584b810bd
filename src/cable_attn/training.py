"""What runs on Hugging Face's Trainer share: who writes, who watches, where a cut-off run goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from cable_attn.models.layers import undecayed_by_encodings

Watcher = Callable[[int, float | None], None]
"""``watch(step, loss)`` after each update; the loss is None between two log lines."""


def leads() -> bool:
    """Of several processes, the one that writes."""
    return os.environ.get("RANK", "0") == "0"


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def last_complete_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end; those that were cut off are removed."""
    numbered = [(int(path.name.rpartition("-")[2]), path) for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*")]
    for _, path in sorted(numbered, reverse=True):
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))  # the Trainer writes it last
            return str(path)
        except (OSError, ValueError):
            if leads():
                shutil.rmtree(path, ignore_errors=True)
    return None


def decayed_parameters(model: nn.Module) -> list[str]:
    """Weight decay is for matrices only: not for biases, norms, or what an encoding calls a scalar."""
    spared = set(undecayed_by_encodings(model))
    return [name for name, value in model.named_parameters() if value.dim() >= 2 and name not in spared]


class DecayingTrainer(Trainer):
    """Weight decay where the paper has it; says nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed_parameters(model)


class Watching(TrainerCallback):
    def __init__(self, watch: Watcher | None):
        self.watch = watch or (lambda step, loss: None)

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.watch(state.global_step, None)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if logs and "loss" in logs:
            self.watch(state.global_step, float(logs["loss"]))
