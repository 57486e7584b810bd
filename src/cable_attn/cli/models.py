"""``cable train`` and ``cable encodings``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cable_attn.cli.common import console, working


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see --list), a .toml file, or a run folder.")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, like encoding=alibi steps=500.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/RECIPE-ENCODING.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would be, and stop.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the recipes that come with the package.")] = False,
) -> None:
    """Pre-train a GPT or BERT with any encoding, from a laptop to many nodes.

    ```
    On a laptop, minutes:      cable train gpt-embedded encoding=cable
    One GPU:                   cable train gpt2-tiny-wikitext103 encoding=alibi
    Eight GPUs:                torchrun --nproc-per-node 8 -m cable_attn train gpt2-small-fineweb-edu
    After a crash or a stop:   the same command with --resume
    ```
    """
    from cable_attn import pretraining
    from cable_attn import recipe as recipes
    from cable_attn.training import leads, processes

    if show or not recipe:
        console.print("\n".join(recipes.builtin()), highlight=False)
        return
    if (Path(recipe) / "recipe.toml").is_file():
        chosen, folder = recipes.load(f"{recipe}/recipe.toml", overrides or []), out or Path(recipe)
    else:
        chosen = recipes.load(recipe, overrides or [])
        folder = out or Path("runs") / f"{Path(recipe).stem}-{chosen.model.encoding}"
    plan = pretraining.plan(chosen, processes())
    if leads():
        model = chosen.model
        table = Table(show_header=False, title=f"{recipe}: {model.family} {model.preset}, {model.encoding}")
        for what, value in plan.items():
            table.add_row(what, f"{value:,}" if isinstance(value, int) else value)
        console.print(table)
    if dry_run:
        return
    try:
        _train(chosen, folder, resume)
    except pretraining.Stopped as stopped:
        console.print(str(stopped), markup=False, highlight=False)
        raise typer.Exit(128 + 15) from None
    if leads():
        console.print(f"Done. The model and metrics.jsonl are in {folder}", markup=False, highlight=False)


def _train(chosen: Any, folder: Path, resume: bool) -> None:
    from cable_attn import pretraining
    from cable_attn.training import leads

    if not leads():
        pretraining.run(chosen, folder, resume)
        return
    first: tuple[int, float] | None = None
    shown = ""
    with working() as progress:
        task = progress.add_task("training", total=chosen.train.steps, what="")

        def watch(step: int, loss: float | None) -> None:
            nonlocal first, shown
            now = time.monotonic()
            first = first or (step, now)
            shown = shown if loss is None else f"loss {loss:.3f}"
            rate = (step - first[0]) * chosen.train.tokens_per_update / max(now - first[1], 1e-9)
            progress.update(task, completed=step, what=f"{shown}  {rate:,.0f} tokens/s")

        pretraining.run(chosen, folder, resume, watch)


def list_encodings() -> None:
    """List every encoding with its options."""
    import inspect

    from cable_attn.encodings import ENCODINGS

    table = Table("name", "what it is", "options (defaults)", "bidirectional")
    for name, encoding in ENCODINGS.items():
        parameters = inspect.signature(encoding.__init__).parameters.values()
        options = [f"{p.name}={p.default!r}" for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        summary = inspect.getdoc(inspect.getmodule(encoding)) or ""
        table.add_row(
            name, escape(summary.splitlines()[0]), escape("\n".join(options)), "no" if encoding.causal_only else "yes"
        )
    console.print(table)
