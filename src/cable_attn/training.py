"""What runs on Hugging Face's Trainer share: who writes, who watches, what stops a run and where it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from cable_attn.errors import CableError, reason
from cable_attn.files import write_atomically
from cable_attn.models.layers import undecayed_by_encodings

Watcher = Callable[[int, float | None], None]
"""``watch(step, loss)`` after each update; the loss is None between two log lines."""


def leads() -> bool:
    """Of several processes, the one that writes."""
    return os.environ.get("RANK", "0") == "0"


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def last_complete_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end."""
    complete = [path for path in _checkpoints(folder) if _is_complete(path)]
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


def remove_cut_off(folder: Path) -> None:
    """The checkpoints that were not written to their end; nobody may be writing one."""
    for path in _checkpoints(folder):
        if not _is_complete(path):
            shutil.rmtree(path, ignore_errors=True)


def _checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*"))


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))  # the Trainer writes it last
    except (OSError, ValueError):
        return False
    return True


def decayed_parameters(model: nn.Module) -> list[str]:
    """Weight decay is for matrices only: not for biases, norms, or what an encoding calls a scalar."""
    spared = set(undecayed_by_encodings(model))
    return [name for name, value in model.named_parameters() if value.dim() >= 2 and name not in spared]


def set_learning_rate(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], rate: float) -> None:
    """These get a learning rate of their own, in groups that are otherwise as before."""
    own = {id(value) for value in parameters}
    for group in list(optimizer.param_groups):
        apart = [value for value in group["params"] if id(value) in own]
        if apart:
            group["params"] = [value for value in group["params"] if id(value) not in own]
            optimizer.add_param_group({**group, "params": apart, "lr": rate})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]


@contextmanager
def _told(checkpoint: str | None) -> Iterator[None]:
    """A damaged checkpoint, in a line."""
    try:
        yield
    except Exception as error:  # torch's and safetensors' are of many kinds
        raise CableError(
            f"checkpoint {checkpoint!r} cannot be read ({reason(error)}). Delete its folder to go on from the one "
            "before."
        ) from error


class DecayingTrainer(Trainer):
    """Weight decay where the paper has it; says nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with _told(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _told(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Without a trace in the random numbers of what is trained after it."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

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


class Stopped(Exception):
    """The run was asked to stop by a signal, and has saved."""

    def __init__(self, message: str, number: int = signal.SIGTERM):
        super().__init__(message)
        self.exit_code = 128 + number


class Stopping(TrainerCallback):
    """When asked: save and stop, all processes at the same step."""

    def __init__(self, asked: list[int]):
        self.asked, self.agreed = asked, False

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.agreed = bool(self.asked)
        if dist.is_initialized() and dist.get_world_size() > 1:
            flag = torch.tensor(int(self.agreed), device=args.device)
            dist.all_reduce(flag)
            self.agreed = int(flag) > 0
        if self.agreed:
            control.should_save = control.should_training_stop = True


@contextmanager
def stop_when_asked() -> Iterator[list[int]]:
    """The signals that came: SIGTERM, or a Ctrl-C, of which a second one stops at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        if number == signal.SIGINT and leads():
            print("\nStopping: this step ends and is saved. Ctrl-C once more stops at once.", file=sys.stderr)
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():  # where signals do not come
        yield asked
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Metrics(TrainerCallback):
    """metrics.jsonl: a line for each log entry, none twice after a resumed run."""

    def __init__(self, path: Path, tokens_per_update: int):
        self.path, self.tokens_per_update = path, tokens_per_update
        self.last_time, self.last_step, self.first_step = time.monotonic(), 0, 0
        self.began = self.last_time

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.began = self.last_time = time.monotonic()
        self.last_step = state.global_step
        self.first_step = state.global_step
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        state.compute_steps(args, state.max_steps)  # a resumed state has those of the run before
        if state.is_world_process_zero and self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= state.global_step]
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
            self.began -= max((line.get("seconds", 0) for line in kept), default=0)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if not logs or not state.is_world_process_zero:
            return
        if "train_runtime" in logs and state.global_step == self.first_step:  # resumed when it was done
            return
        per_update = self.tokens_per_update
        now = time.monotonic()
        line = {"step": state.global_step, "tokens": state.global_step * per_update, **logs}
        line["seconds"] = round(now - self.began, 3)  # of all processes that have worked on it
        if "loss" in logs:  # since the last such line
            done = (state.global_step - self.last_step) * per_update
            line["tokens_per_second"] = round(done / max(now - self.last_time, 1e-9))
            self.last_time, self.last_step = now, state.global_step
        if "train_runtime" in logs and torch.cuda.is_available():
            line["peak_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines: the last one may have been cut off."""
    return [line for line in map(_parsed, path.read_text(encoding="utf-8").splitlines()) if line]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line))
    except ValueError:  # cut off in the middle
        return None
