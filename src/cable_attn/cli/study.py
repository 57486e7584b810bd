"""``cable study``, ``cable reproduce`` and ``cable demo``: train and read every cell of a study, and make its table."""

from __future__ import annotations

import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cable_attn.cli.common import console, names, say, working
from cable_attn.errors import CableError, require_known
from cable_attn.recipe import MOST_SEED

app = typer.Typer(
    help="Every table of the paper is a file: train and read its cells, then make the table.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

PAPER = {
    "table1": ["fineweb-edu-medium", "wikitext103-tiny"],
    "table2": ["dape"],
    "table3": ["bert-mlm", "mldr"],
    "table4": ["fineweb-edu-small", "fineweb-edu-tiny"],
    "table5": ["wikitext103-medium", "wikitext103-small"],
    "figure1": ["fineweb-edu-medium"],
    "figure5": ["k-cable"],
    "figure6": ["bert-mlm"],
    "figure7": ["bert-mlm", "mldr"],
}
"""The paper's tables and figures by number."""
MULTIPLES = (1, 2, 4, 8, 16)
PAGES = "docs/results.md,docs/claims.md,README.md"
MARK = "demo.json"
"""What tells the demo's folder from any other."""

File = Annotated[str, typer.Argument(help="A study's name (see cable study list) or a .toml file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value for the recipe of every cell.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the cells; default: runs/studies/NAME.")]


@app.command(name="list")
def list_studies(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="For a document: the table of docs/reproduce.md.")
    ] = False,
) -> None:
    """List the studies that come with the package, and what each costs."""
    from cable_attn import study as studies
    from cable_attn.tables import markdown_table

    header = ("study", "what", "the paper's", "cells", "tokens each", "hours on one H100")
    rows = [_overview(studies.load(name)) for name in studies.builtin()]
    if markdown:
        say(markdown_table(header, rows))
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _overview(study: Any) -> tuple[str, ...]:
    from cable_attn import study as studies

    places = ", ".join(place for place, found in PAPER.items() if study.name in found)
    known = (study.name, study.title, places, str(len(study.cells())))
    if study.trained_by:
        return (*known, "–", "–")
    cost = studies.plan(study)
    tokens, hours = cost[0]["tokens"], sum(row["hours"] for row in cost)
    told = f"{tokens / 1e9:.3g}B" if tokens >= 1e8 else f"{tokens / 1e6:.1g}M"
    return (*known, told, f"{hours:.3g}" if hours > 0.1 else "< 0.1")


@app.command(name="run")
def run_study(
    file: File,
    overrides: Overrides = None,
    out: Out = None,
    only: Annotated[str, typer.Option(help="Cells or variants, with commas between: cable,rope-1.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time, each in a process and on a GPU of its own.")] = 1,
    launcher: Annotated[str, typer.Option(help='Put before each cell\'s command, like "srun --gpus=1".')] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the cells would cost, and stop.")] = False,
) -> None:
    """Train and read every cell. What is done stays, what was cut off goes on; a failed cell does not stop the rest.

    ```
    cable study run demo                                     minutes on a laptop
    cable study run wikitext103-tiny --only cable,alibi      two rows of a table
    cable study run table.toml --jobs 8                      eight GPUs
    cable study run table.toml --jobs 64 --launcher "srun --gpus=1 --time=8:00:00"
    ```
    """
    from cable_attn import study as studies

    study = studies.load(file, overrides or [])
    if dry_run:
        console.print(_plan_table(study))
        return
    folder = out or _folder(study)
    wanted = names(only, "--only") if only else []
    if study.speeds and not launcher:
        _require_own_gpus(study, jobs)
    if jobs == 1 and not launcher:
        failed = _run_here(study, folder, wanted)
    else:
        failed = _run_in_processes(study, file, overrides or [], folder, wanted, jobs, shlex.split(launcher))
    _tell_failures(failed, len(studies.choose(study, wanted)))
    if study.retrieval is not None and not wanted:
        _add_baseline(study, folder)
    _tell_page(_report(study, folder))
    if failed:
        raise typer.Exit(1)


@app.command(name="report")
def report(
    file: Annotated[str, typer.Argument(help="A study's name or a .toml file; none: the pages of results.")] = "",
    overrides: Overrides = None,
    out: Out = None,
    stored: Annotated[Path, typer.Option(help="For the pages: where studies and their results are stored.")] = Path(
        "benchmarks"
    ),
    pages: Annotated[str, typer.Option(help="Which to write anew, with commas between.")] = PAGES,
    figures: Annotated[Path, typer.Option(help="The folder of the pages' figures.")] = Path("docs/results"),
) -> None:
    """Make the table (terminal, Markdown, CSV, LaTeX) and figures of what is done, the paper's numbers beside ours.

    ```
    cable study report wikitext103-tiny       from runs/studies/wikitext103-tiny
    cable study report                        docs/results.md and its figures, from benchmarks/results
    ```
    """
    from cable_attn import evidence
    from cable_attn import study as studies

    if not file:
        for page in names(pages, "--pages"):
            say("Written: " + ", ".join(str(path) for path in evidence.fill(Path(page), stored, figures)))
        return
    study = studies.load(file, overrides or [], checked=False)
    _tell_page(_report(study, out or _folder(study)))


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(PAPER)}, or a study's name.")] = "",
    overrides: Overrides = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time, each in a process and on a GPU of its own.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the cells would cost, and stop.")] = False,
) -> None:
    """Run the studies behind a table or figure of the paper. Figure 3 is `cable bench train`.

    Example: `cable reproduce table1 --dry-run`
    """
    from cable_attn import study as studies

    if not what:
        list_studies(markdown=False)
        return
    if what == "figure3":
        raise CableError("Figure 3 is speed and memory, which has no study: cable bench train, and cable bench decode.")
    require_known("table or study", what, [*PAPER, *studies.builtin()])
    failed = False
    wanted = PAPER.get(what, [what])
    for name in wanted:
        try:
            run_study(name, overrides, None, "", jobs, "", dry_run)
        except CableError as error:
            if len(wanted) == 1:
                raise
            say(f"{name}: {error}")
            failed = True
        except typer.Exit as stopped:
            if stopped.exit_code != 1:  # asked to stop
                raise
            failed = True
    if failed:
        raise typer.Exit(1)


def demo(
    out: Annotated[Path, typer.Option(help="Where checkpoints, numbers and the figure go.")] = Path("runs/demo"),
    text: Annotated[
        Path | None, typer.Option(help="Your own text (a file, or a folder of .txt files) instead of Jane Austen's.")
    ] = None,
    encodings: Annotated[
        str, typer.Option(help="Comma-separated names, see `cable encodings`.")
    ] = "cable,alibi,rope,sinusoidal,nope",
    steps: Annotated[int, typer.Option(min=1, help="Training steps for each encoding.")] = 600,
    length: Annotated[int, typer.Option(min=2, help="Training length in tokens; read at 1 to 16 times that.")] = 128,
    eval_tokens: Annotated[int, typer.Option(min=1, help="About how many held-out tokens to predict.")] = 32768,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Same seed and machine, same numbers.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw an earlier run in the folder away.")] = False,
) -> None:
    """Train a small GPT with each encoding on short windows and read text 16 times longer.

    A few minutes on a laptop CPU. Stop it at any time: the same command goes on where it was.
    Afterwards every encoding has a checkpoint that loads anywhere:

        import cable_attn
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained("runs/demo/cable-0")

    It is the study `demo`: `cable study run demo` does the same.
    """
    from cable_attn import study as studies
    from cable_attn.data import hold_out, read_texts
    from cable_attn.files import writable_folder, write_json

    wanted = names(encodings, "--encodings")
    documents = None if text is None else hold_out(read_texts(text))
    is_new = not out.is_dir() or not any(out.iterdir())
    if not is_new and not (out / MARK).exists():
        raise CableError(f"{str(out)!r} is not empty and no run of the demo. Choose another folder with --out.")
    lengths = [length * multiple for multiple in MULTIPLES]
    overrides = [f"steps={steps}", f"warmup_steps={steps // 20}", f"length={length}", f"tokens_per_update={4 * length}"]
    if text is not None:
        overrides.append(f"path={out / 'data'}")
    study = studies.load("demo", overrides)
    variants = {name: study.variants.get(name, [f"encoding={name}"]) for name in wanted}
    reading = replace(study.reading, tokens=max(eval_tokens, lengths[-1]))
    study = replace(study, variants=variants, seeds=[seed], lengths=lengths, reading=reading)
    studies.check(study)
    start = time.monotonic()
    if fresh and not is_new:  # now that all that is asked for is known to be good
        shutil.rmtree(out)
        is_new = True
    writable_folder(out)
    try:
        write_json(out / MARK, {"lengths": lengths})
        if documents is not None:
            _prepare(text, documents, out / "data", study)
        _require_windows(study, out)
    except CableError:
        if is_new:  # nothing was done, so nothing is left behind
            shutil.rmtree(out, ignore_errors=True)
        raise
    _require_same_settings(study, out)
    failed = _run_here(study, out, [])
    _tell_failures(failed, len(study.cells()))
    page = _report(study, out)
    say(f"{time.monotonic() - start:.0f} s." + (f" All of it on one page: {page}" if page else ""))
    if failed:
        raise typer.Exit(1)


def _prepare(text: Path | None, documents: tuple[list[Any], list[Any]], folder: Path, study: Any) -> None:
    """Tokens of a user's own text, its end held out."""
    from cable_attn.data.shards import Request, prepare
    from cable_attn.data.tokenizers import find_tokenizer

    vocabulary = study.cells()[0].recipe().model.vocab_size
    train, held_out = documents
    streams = {"train": lambda skip: iter(train[skip:]), "validation": lambda skip: iter(held_out[skip:])}
    name = f"bpe:{vocabulary}"
    prepare(folder, Request(str(text), name), streams, find_tokenizer(name, train))


def _require_windows(study: Any, out: Path) -> None:
    """Text enough to train on and to read."""
    from cable_attn import cells
    from cable_attn.data.shards import Tokens
    from cable_attn.data.windows import TokenWindows

    cell = study.cells()[0]
    if cell.recipe().data.path != "embedded":
        TokenWindows(Tokens(out / "data", "train"), cell.recipe().data.length)
    cells.check_reading(cell)


def _require_same_settings(study: Any, out: Path) -> None:
    from cable_attn import cells

    try:
        for cell in study.cells():
            cells.stored_result(cell, out)
    except CableError as error:
        raise CableError(f"{error} With --fresh the demo begins anew.") from None


def _add_baseline(study: Any, folder: Path) -> None:
    from cable_attn import cells

    try:
        cells.add_baseline(study, folder)
    except Exception as error:  # a table without it is better than none
        say(f"No BM25 beside: {error}")


def _folder(study: Any) -> Path:
    return Path("runs/studies") / study.name


def _plan_table(study: Any) -> Table:
    from cable_attn import study as studies

    rows = studies.plan(study)
    caption = f"The models are those of the study {study.trained_by}." if study.trained_by else None
    columns = ("cell", "parameters", "tokens to train on", "hours on one H100, about")
    table = Table(*columns, title=study.title, caption=caption)
    for row in rows:
        table.add_row(row["cell"], f"{row['parameters']:,}", f"{row['tokens']:,}", f"{row['hours']:.2f}")
    total = sum(row["tokens"] for row in rows), sum(row["hours"] for row in rows)
    table.add_row("all", "", f"{total[0]:,}", f"{total[1]:.2f}", style="bold")
    return table


def _run_here(study: Any, folder: Path, only: list[str]) -> dict[str, str]:
    from cable_attn import cells
    from cable_attn import study as studies
    from cable_attn.training import Stopped

    with working() as progress:
        bars = {
            cell.name: progress.add_task(cell.name, total=1.0, start=False, what="waiting")
            for cell in studies.choose(study, only)
        }

        def watch(name: str, what: str, share: float) -> None:
            progress.start_task(bars[name])
            progress.update(bars[name], what=what, completed=share)

        try:
            return cells.run(study, folder, only=only, watch=watch)
        except Stopped as stopped:
            say("Stopped and saved. The same command goes on from here.")
            raise typer.Exit(stopped.exit_code) from None


def _require_own_gpus(study: Any, jobs: int) -> None:
    import torch

    most = max(torch.cuda.device_count(), 1)
    if jobs > most:
        raise CableError(
            f"study {study.name!r} tells how fast its cells are, and --jobs {jobs} would let them share a GPU. "
            f"Give --jobs {most}."
        )


def _run_in_processes(
    study: Any, file: str, overrides: list[str], folder: Path, only: list[str], jobs: int, launcher: list[str]
) -> dict[str, str]:
    from cable_attn import cells
    from cable_attn import jobs as processes
    from cable_attn import study as studies
    from cable_attn.files import writable_folder

    writable_folder(folder / "logs")
    left = [cell for cell in studies.choose(study, only) if cells.stored_result(cell, folder) is None]
    commands = {cell.name: cells.command(file, folder, cell, overrides, launcher) for cell in left}
    with working() as progress:
        bars = {name: progress.add_task(name, total=None, start=False, what="waiting") for name in commands}

        def watch(name: str, what: str) -> None:
            progress.start_task(bars[name])
            progress.update(bars[name], what=what)
            if what != "running":
                progress.update(bars[name], total=1, completed=1)

        try:
            return processes.run_in_processes(commands, folder / "logs", jobs, watch, own_gpus=not launcher)
        except SystemExit:
            say("Stopped. The same command goes on from here.")
            raise


def _tell_failures(failed: dict[str, str], chosen: int) -> None:
    if failed and len(failed) == chosen and len(set(failed.values())) == 1:
        raise CableError(next(iter(failed.values())))
    for name, reason in failed.items():
        say(f"{name} failed: {reason}")


def _tell_page(page: Path | None) -> None:
    if page is not None:
        say(f"All of it on one page: {page}")


def _report(study: Any, folder: Path) -> Path | None:
    """Tables and figures of what is done, in the study's folder, and a page with all of it."""
    from cable_attn import summary

    gathered = summary.gather_study(study, folder)
    rows = gathered.rows
    if not rows:
        say(f"Nothing is done yet in {folder}.")
        return None
    tables = summary.length_tables(gathered)
    for name, table in tables.items():
        _write_table(table, folder / name)
    if not tables:
        console.print(_loss_table(study.title, rows))
    left = [cell.name for cell in study.cells() if cell.name not in {row["cell"] for row in rows}]
    if left:
        say(f"Not done: {', '.join(left)}")
    say(f"Results: {folder}")
    _draw(gathered, folder)
    return summary.write(folder, gathered)


def _write_table(table: Any, stem: Path) -> None:
    """Shown, and kept in every form."""
    from cable_attn.files import write_atomically

    console.print(table.rich())
    for name, content in (("md", table.markdown() + "\n"), ("csv", table.csv()), ("tex", table.latex())):
        write_atomically(stem.with_name(f"{stem.name}.{name}"), content)
    say(f"Table: {stem}.md, .csv, .tex")


def _loss_table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table("cell", "loss", "loss on held-out text", title=title)
    for row in rows:
        table.add_row(row["cell"], *(f"{row['training'].get(key, float('nan')):.4f}" for key in ("loss", "eval_loss")))
    return table


def _draw(gathered: Any, folder: Path) -> None:
    from cable_attn import summary

    try:
        paths = [path for figure in summary.figures(gathered) for path in figure.draw(folder / figure.name)]
    except ImportError:
        say("No figure: matplotlib is missing. pip install 'cable-attn[plot]'")
        return
    say("Figures: " + ", ".join(str(path) for path in paths))
