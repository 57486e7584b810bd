"""The command line: ``cable``."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from transformers.utils import logging
from typer.core import TyperGroup

from cable_attn.cli import bench, data, evaluation, generation, look, models, retrieval, study
from cable_attn.cli.common import say
from cable_attn.errors import CableError


class _Commands(TyperGroup):
    """Says a word after Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            Console(stderr=True).print(
                "Interrupted. Studies and data go on with the same command, a training run with --resume."
            )
            raise typer.Exit(128 + signal.SIGINT) from None


app = typer.Typer(
    cls=_Commands,
    help="Train short, read long: position encodings that keep working past the training length.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(study.demo)
app.command()(models.train)
app.command()(models.convert)
app.command(name="eval")(evaluation.evaluate)
app.command()(generation.generate)
app.command()(generation.serve)
app.command()(look.explore)
app.add_typer(look.plot_app, name="plot")
app.command()(look.report)
app.add_typer(study.app, name="study")
app.command()(study.reproduce)
app.add_typer(retrieval.app, name="retrieve")
app.add_typer(data.data_app, name="data")
app.add_typer(bench.bench_app, name="bench")
app.command(name="encodings")(models.list_encodings)


def main() -> None:
    """Entry point: what a person can fix is one line and exit code 2, not a traceback."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        app()
    except CableError as error:
        _fail(str(error))
    except Exception as error:
        if os.strerror(errno.ENOSPC) in str(error):  # also of libraries that are not Python
            _fail("the disk is full. What was written before is whole; make room, and go on.")
        if not isinstance(error, OSError) or error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}.")


def _fail(message: str) -> None:
    Console(stderr=True).print(f"[bold red]Error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        from cable_attn import __version__

        say(f"cable-attn {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None: ...
