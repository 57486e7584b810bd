"""``cable train``, ``cable convert`` and ``cable encodings``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cable_attn.cli.common import console, numbers, say, working


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
    from cable_attn import recipe as recipes
    from cable_attn.training import Stopped, leads, read_metrics

    if show or not recipe:
        console.print("\n".join(recipes.builtin()), highlight=False)
        return
    if (Path(recipe) / "recipe.toml").is_file():
        chosen, folder = recipes.load(f"{recipe}/recipe.toml", overrides or []), out or Path(recipe)
    else:
        chosen = recipes.load(recipe, overrides or [])
        folder = out or Path("runs") / f"{Path(recipe).stem}-{chosen.model.encoding}"
    model = chosen.model
    what = model.checkpoint or f"{model.family} {model.preset}"
    _show_plan(f"{recipe}: {what}, {model.encoding}", chosen)
    if dry_run:
        return
    try:
        _train(chosen, folder, resume)
    except Stopped as stopped:
        say(f"{stopped} Go on with: cable train … --resume")
        raise typer.Exit(stopped.exit_code) from None
    if leads():
        if not any("eval_loss" in row for row in read_metrics(folder / "metrics.jsonl")):
            say("No loss on held-out text: the data have no validation split as long as a window.")
        console.print(f"Done. The model and metrics.jsonl are in {folder}", markup=False, highlight=False)


def _show_plan(title: str, chosen: Any) -> None:
    from cable_attn import pretraining
    from cable_attn.training import leads, processes

    plan = pretraining.plan(chosen, processes())
    if leads():
        table = Table(show_header=False, title=title)
        for what, value in plan.items():
            table.add_row(what, f"{value:,}" if isinstance(value, int) else value)
        console.print(table)


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


def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A causal language model: a folder, or a name of the hub.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the converted checkpoint.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as for cable train.")] = None,
    encoding: Annotated[str, typer.Option(help="What it gets; none: more training, for comparison.")] = "cable",
    tokens: Annotated[int, typer.Option(min=1, help="How many to train on.")] = 100_000_000,
    data: Annotated[
        str, typer.Option(help="A folder of cable data prepare with the model's tokenizer, or any source of text.")
    ] = "embedded",
    length: Annotated[int, typer.Option(min=0, help="Tokens at a time; 0: what the model knows, at most 1024.")] = 0,
    keep_positions: Annotated[
        bool, typer.Option("--keep-positions", help="Add the encoding to the model's positions.")
    ] = False,
    weights: Annotated[str, typer.Option(help="Which learn: all, new (the encoding's only) or lora.")] = "all",
    lengths: Annotated[str, typer.Option(help="To read before and after; default: 1/2 to 8 times the length.")] = "",
    eval_tokens: Annotated[int, typer.Option(min=0, help="Of held-out text to read, about; 0: all.")] = 262_144,
) -> None:
    """Give a checkpoint another position encoding, by continued pre-training; perplexity by length before and after.

    The same command goes on where it was cut off.

    ```
    Replace RoPE:          cable convert meta-llama/Llama-3.2-1B runs/llama-cable --data data/mine --tokens 1000000000
    Beside RoPE:           cable convert … --keep-positions
    New weights only:      cable convert … --weights new
    For comparison:        cable convert … --encoding none
    ```
    """
    from cable_attn import conversion
    from cable_attn.recipe import ModelPart
    from cable_attn.tables import LengthTable
    from cable_attn.training import Stopped

    wanted = numbers(lengths) if lengths else []
    model = ModelPart(encoding=encoding, checkpoint=source, keep_positions=keep_positions, weights=weights)
    chosen = conversion.plan(model, tokens, length, overrides or [])
    _show_plan(f"{source} → {encoding}", chosen)
    try:
        with working() as progress:
            task = progress.add_task("converting", total=1.0, what="")

            def tell(split: str, count: int) -> None:
                progress.update(task, what=f"tokens of {split}")

            chosen, text = conversion.prepare_data(data, chosen, out, eval_tokens, tell)
            found = conversion.convert(
                chosen,
                text,
                out,
                wanted,
                lambda what, share: progress.update(task, what=what, completed=share),
            )
            progress.update(task, what="done", completed=1.0)
    except Stopped as stopped:
        say(f"{stopped} The same command goes on.")
        raise typer.Exit(stopped.exit_code) from None
    rows = {"before": found["before"], f"after, {encoding}": found["after"]}
    values = {
        name: {row["length"]: [row["perplexity"]] for row in read if "perplexity" in row} for name, read in rows.items()
    }
    console.print(LengthTable("Perplexity on held-out text", values, chosen.data.length).rich())
    say(f"Done. The checkpoint and {conversion.FILE} are in {out}")


def list_encodings() -> None:
    """List every encoding with its options."""
    import inspect

    from cable_attn.encodings import ENCODINGS

    table = Table("name", "what it is", "options (defaults)", "bidirectional")
    modules = [encoding.__module__ for encoding in ENCODINGS.values()]
    for name, encoding in ENCODINGS.items():
        parameters = inspect.signature(encoding.__init__).parameters.values()
        options = [f"{p.name}={p.default!r}" for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        summary = (inspect.getdoc(inspect.getmodule(encoding)) or "").splitlines()[0].rstrip(":.") + "."
        if modules.count(encoding.__module__) > 1:
            summary += f" {(encoding.__doc__ or '').splitlines()[0]}"
        table.add_row(name, escape(summary), escape("\n".join(options)), "no" if encoding.causal_only else "yes")
    console.print(table)
