"""What all commands share."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cable_attn.errors import CableError

console = Console()
LINE_EVERY = 20.0
"""Seconds between two lines about one task, where there is no terminal."""


class _Progress(Progress):
    """Bars; where there is no terminal (a log, CI) a plain line now and then, so that no one has to guess."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.told: dict[TaskID, tuple[float, str]] = {}

    def update(self, task_id: TaskID, *args: Any, **kwargs: Any) -> None:
        super().update(task_id, *args, **kwargs)
        task = next(task for task in self.tasks if task.id == task_id)
        if task.total is not None and task.completed < task.total:
            task.finished_time = None  # another part of the work has begun
        if not self.console.is_terminal:
            self._tell(task)

    def _tell(self, task: Task) -> None:
        now, what = time.monotonic(), str(task.fields.get("what", ""))
        before, said = self.told.get(task.id, (-LINE_EVERY, ""))
        stage = what.partition(",")[0]
        if now - before >= LINE_EVERY or (task.finished and stage != said):
            self.told[task.id] = (now, stage)
            share = "" if task.total is None else f"{task.percentage:.0f} %"
            say(f"{task.description:>13} {share:>5} {task.elapsed or 0:>6.0f} s  {what}")


@contextmanager
def working() -> Iterator[Progress]:
    """Progress bars, and no denormals: they slow attention's backward pass 3 times.

    Flushing them is a setting of the whole process, so only the command line does it, never the library.
    """
    import torch

    torch.set_flush_denormal(True)
    warnings.filterwarnings("ignore", message="The value of the smallest subnormal")  # numpy: there are none now
    columns = (
        TextColumn("{task.description:>13}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    try:
        with _Progress(*columns, console=console) as progress:
            yield progress
    finally:
        torch.set_flush_denormal(False)


def numbers(text: str) -> list[int]:
    """What ``--lengths`` gives, like ``9,512``, as a list, in order."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdecimal() or int(part) < 1]
    if wrong or not parts:
        raise CableError(f"--lengths wants whole numbers like 128,512, got {wrong[0] if wrong else text!r}.")
    return sorted({int(part) for part in parts})


def names(text: str, option: str) -> list[str]:
    """``a,b`` as a list."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise CableError(f"{option} is empty. Name at least one.")
    return found


def say(text: str) -> None:
    """A plain line: paths and numbers are not markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
