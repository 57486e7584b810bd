"""What all commands share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from cable_attn.errors import CableError

console = Console()


@contextmanager
def working() -> Iterator[Progress]:
    """Our own progress bars, none of the libraries', and no denormals: they slow attention's backward pass 3 times.

    Flushing them is a setting of the whole process, so only the command line does it, never the library.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
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
        with Progress(*columns, console=console) as progress:
            yield progress
    finally:
        torch.set_flush_denormal(False)


def numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdigit() or int(part) < 1]
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
