"""The command line: ``cable``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
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
            Console(stderr=True).print("Interrupted. What can be resumed goes on with the same command.")
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
    try:
        app()
    except CableError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None:
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
