"""The command line: ``cable``."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cable_attn.errors import CableError, require_known

app = typer.Typer(
    help="Train short, read long: position encodings that keep working past the training length.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
console = Console()


def main() -> None:
    """Entry point: what a person can fix is one line and exit code 2, not a traceback."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except CableError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        Console(stderr=True).print("Interrupted. The same command goes on from here.")
        sys.exit(130)


@contextmanager
def _working() -> Iterator[Progress]:
    """Our own progress bars, none of the libraries', and no denormals: they slow attention's backward pass 3 times.

    Flushing them is a setting of the whole process, so only the command line does it, never the library.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_flush_denormal(True)
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


def _version(wanted: bool) -> None:
    if wanted:
        from cable_attn import __version__

        console.print(f"cable-attn {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None: ...


@app.command()
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
    seed: Annotated[int, typer.Option(help="The same seed on the same machine gives the same numbers.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw an earlier run in the folder away.")] = False,
) -> None:
    """Train a small GPT with each encoding on short windows and read text 16 times longer.

    A few minutes on a laptop CPU. Stop it at any time: the same command goes on where it was.
    Afterwards every encoding has a checkpoint that loads anywhere:

        import cable_attn
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained("runs/demo/cable")
    """
    from cable_attn.demo import DemoSettings, run_demo
    from cable_attn.report import perplexity_table

    names = tuple(name.strip() for name in encodings.split(",") if name.strip())
    if not names:
        raise CableError("--encodings is empty. Name at least one, see `cable encodings`.")
    settings = DemoSettings(encodings=names, steps=steps, length=length, eval_tokens=eval_tokens, seed=seed)
    if fresh and out.exists():
        _forget(out)
    start = time.monotonic()
    with _working() as progress:
        tasks = {name: progress.add_task(name, total=1.0, start=False, what="waiting") for name in names}

        def watch(name: str, what: str, share: float) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], what=what, completed=share)

        results = run_demo(out, settings, text, watch)
    console.print(perplexity_table(results, settings.length))
    console.print(f"{time.monotonic() - start:.0f} s. Numbers: {out / 'results.json'}", markup=False, highlight=False)
    _draw(results, settings.length, out / "perplexity")


def _forget(out: Path) -> None:
    """Remove a demo run, and nothing that is not one."""
    if any(out.iterdir()) and not (out / "settings.json").exists():
        raise CableError(f"{str(out)!r} is not empty and not a demo run, so --fresh will not delete it.")
    shutil.rmtree(out)


def _draw(results: dict[str, dict[int, float]], trained_at: int, stem: Path) -> None:
    from cable_attn.report import perplexity_figure

    try:
        paths = perplexity_figure(results, trained_at, stem)
    except ImportError:
        console.print("No figure: matplotlib is missing. pip install 'cable-attn[plot]'", markup=False, highlight=False)
        return
    console.print("Figure: " + ", ".join(str(path) for path in paths), markup=False, highlight=False)


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder of a causal language model.")],
    text: Annotated[
        Path | None, typer.Option(help="A text file or a folder of .txt files; default: the embedded test novel.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Comma-separated numbers of tokens to read at once.")] = "128,512,2048",
    tokens: Annotated[int, typer.Option(min=1, help="About how many tokens to predict.")] = 32768,
) -> None:
    """Perplexity at several lengths, on the very same tokens at each.

    Example: `cable eval runs/demo/cable --lengths 128,1024,4096`
    """
    from cable_attn.data import embedded_corpus, encode, read_texts
    from cable_attn.evaluation import comparable, perplexity
    from cable_attn.models.loading import load_causal_lm

    wanted = _numbers(lengths)
    model, tokenizer = load_causal_lm(checkpoint)
    documents = embedded_corpus("test") if text is None else read_texts(text)
    held_out = comparable(encode(documents, tokenizer), wanted, tokens)
    table = Table("tokens at once", "perplexity", title=f"{checkpoint}: {len(held_out) - 1} tokens")
    with _working() as progress:
        for length in wanted:
            task = progress.add_task(str(length), total=len(held_out) - 1, what="reading")
            value = perplexity(model, held_out, length, on_tokens=partial(progress.advance, task))
            table.add_row(str(length), f"{value:.2f}")
    console.print(table)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see --list), a .toml file, or a run folder.")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, like encoding=alibi steps=500.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/RECIPE-ENCODING.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last complete checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would be, and stop.")] = False,
    show: Annotated[bool, typer.Option("--list", help="List the recipes that come with the package.")] = False,
) -> None:
    """Pre-train a GPT or BERT with any encoding, from a laptop to many nodes.

    On a laptop, minutes:      cable train gpt-embedded encoding=cable
    One GPU:                   cable train gpt2-tiny-wikitext103 encoding=alibi
    Eight GPUs:                torchrun --nproc-per-node 8 -m cable_attn train gpt2-small-fineweb-edu
    After a crash or a stop:   the same command with --resume
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
    with _working() as progress:
        task = progress.add_task("training", total=chosen.train.steps, what="")

        def watch(step: int, loss: float | None) -> None:
            nonlocal first, shown
            now = time.monotonic()
            first = first or (step, now)
            shown = shown if loss is None else f"loss {loss:.3f}"
            rate = (step - first[0]) * chosen.train.tokens_per_update / max(now - first[1], 1e-9)
            progress.update(task, completed=step, what=f"{shown}  {rate:,.0f} tokens/s")

        pretraining.run(chosen, folder, resume, watch)


data_app = typer.Typer(help="Turn texts into token shards, and check them.")
app.add_typer(data_app, name="data")


@data_app.command(name="prepare")
def data_prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="embedded, fineweb-edu, fineweb-1b, wikitext-103, a file or folder (.txt .md .jsonl .parquet), "
            "or a dataset id owner/name."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    tokenizer: Annotated[
        str, typer.Option(help="gpt2 or any Hugging Face name or folder, tiktoken, or bpe:SIZE to learn one.")
    ] = "gpt2",
    column: Annotated[str, typer.Option(help="Where the text is in JSONL, parquet or a dataset.")] = "text",
    held_out: Annotated[
        float | None, typer.Option(help="Share of documents for validation, if the source has no such split.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens of each split.")] = None,
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a shard.")] = 100_000_000,
) -> None:
    """Tokenize a source into memory-mapped shards with a manifest. Stop it at any time: the same command goes on.

    Example: `cable data prepare wikitext-103 data/wikitext-103`, or `cable data prepare my-texts/ data/mine
    --tokenizer bpe:8192`.
    """
    from cable_attn.data.shards import Request, prepare
    from cable_attn.data.sources import open_source
    from cable_attn.data.tokenizers import find_tokenizer

    streams = open_source(source, column, held_out)
    chosen = find_tokenizer(tokenizer, next(iter(streams.values()))(0))
    begun, written = time.monotonic(), 0
    with _working() as progress:
        tasks = {split: progress.add_task(split, total=tokens, start=False, what="waiting") for split in streams}

        def tell(split: str, count: int) -> None:
            nonlocal written
            written += count
            progress.start_task(tasks[split])
            rate = written / max(time.monotonic() - begun, 1e-9) / 1e6
            progress.update(tasks[split], advance=count, what=f"{rate:.2f}M tokens/s")

        manifest = prepare(
            out, Request(source, tokenizer, tokens, shard_tokens, column, held_out), streams, chosen, tell
        )
    console.print(_splits_table(manifest, out))


@data_app.command(name="import")
def data_import(
    files: Annotated[list[str], typer.Argument(help="SPLIT=FILE, like train=books.bin: uint16 tokens, also .xz.")],
    out: Annotated[Path, typer.Option(help="Folder for the shards.")],
    vocab_size: Annotated[int, typer.Option(min=2, help="Of the tokenizer that made the tokens.")] = 50257,
    separator: Annotated[int, typer.Option(min=0, help="The token before each document.")] = 50256,
) -> None:
    """Take over tokens that were made elsewhere, GPT-2's by default.

    Example: `cable data import train=books.bin validation=more.bin --out data/books`
    """
    from cable_attn.data.shards import import_tokens

    pairs = [file.partition("=") for file in files]
    wrong = [split for split, equals, _ in pairs if not equals]
    if wrong:
        raise CableError(f"each file is SPLIT=FILE, like train=books.bin; got {wrong[0]!r}.")
    manifest = import_tokens(out, {split: Path(path) for split, _, path in pairs}, vocab_size, separator)
    console.print(_splits_table(manifest, out))


def _splits_table(manifest: dict[str, Any], out: Path) -> Table:
    table = Table("split", "tokens", "documents", "shards", title=str(out))
    for split, entry in manifest["splits"].items():
        table.add_row(split, f"{entry['tokens']:,}", f"{entry['documents']:,}", str(len(entry["shards"])))
    return table


@data_app.command(name="verify")
def data_verify(folder: Annotated[Path, typer.Argument(help="A folder of cable data prepare.")]) -> None:
    """Check every shard's size and hash against the manifest."""
    from cable_attn.data.shards import verify

    wrong = verify(folder, lambda name: console.print(name, highlight=False))
    if wrong:
        raise CableError("; ".join(wrong) + ".")
    console.print("All shards are whole.")


bench_app = typer.Typer(help="Measure speed and memory beside the peers, behind a correctness gate.")
app.add_typer(bench_app, name="bench")


@bench_app.command(name="attention")
def bench_attention(
    shapes: Annotated[
        str, typer.Option(help="batch,heads,tokens,dim, several with ';' between; default: the four standard ones.")
    ] = "",
    results: Annotated[Path, typer.Option(help="JSONL file to which the rows are added.")] = Path(
        "benchmarks/results/attention.jsonl"
    ),
) -> None:
    """Fused CABLE attention against SDPA (flash, cuDNN), FlexAttention, a materialised bias and others.

    Needs a GPU. Prints GPU times in milliseconds and adds a JSON line for each row, with commit, GPU and versions.
    """
    from cable_attn.bench import attention as bench
    from cable_attn.bench.records import append
    from cable_attn.environment import environment

    wanted = _shapes(shapes) if shapes else bench.SHAPES
    around = environment()
    for row in bench.run(wanted, console.print):
        append(results, [{**row, **around}])
        console.print(_bench_line(row), highlight=False, soft_wrap=True)
    console.print("cable bench report makes the table and the figure of them.")
    console.print(f"Rows added to {results}", markup=False, highlight=False)


@bench_app.command(name="tiles")
def bench_tiles(
    shape: Annotated[str, typer.Option(help="batch,heads,tokens,dim of your model's calls.")] = "4,32,4096,64",
    bias: Annotated[str, typer.Option(help="cable or k-cable.")] = "cable",
    out: Annotated[Path, typer.Option(help="Tiles file; an entry for the same head dimension is replaced.")] = Path(
        "tiles.json"
    ),
) -> None:
    """Find the fastest tile sizes for this GPU; CABLE_TILES=tiles.json then makes every process use them.

    Needs a GPU and a few minutes. The tables that ship were made for the H100 and H200.
    """
    from cable_attn.bench import tiles as bench
    from cable_attn.files import read_json, write_json

    require_known("bias", bias, list(bench.BIASES))
    rows = []
    for row in bench.run(_shapes(shape)[0], bias, console.print):
        rows.append(row)
        console.print(f"{row['kernel']:>8} {tuple(row['tile'])} {row['ms']:.3f} ms", highlight=False)
    entry = bench.best(rows)
    known = read_json(out) if out.exists() else []
    same = [(old["dim"], old["kernel"]) == (entry["dim"], entry["kernel"]) for old in known]
    write_json(out, [old for old, is_same in zip(known, same) if not is_same] + [entry])
    console.print(f"Written: {out}. Use it with CABLE_TILES={out}", markup=False, highlight=False)


@bench_app.command(name="train")
def bench_train(
    sizes: Annotated[str, typer.Option(help="Of tiny, small, medium, with commas between.")] = "tiny,small,medium",
    encodings: Annotated[str, typer.Option(help="Names, with commas between; default: the paper's.")] = "",
    steps: Annotated[int, typer.Option(min=20, help="Updates of each cell; the second half counts.")] = 60,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value for every cell's recipe.")] = None,
    results: Annotated[Path, typer.Option(help="JSONL file to which the rows are added.")] = Path(
        "benchmarks/results/training.jsonl"
    ),
) -> None:
    """Tokens per second and peak memory of training with each encoding, through cable train.

    The default list ends with CABLE as the authors' code does it, with a materialised bias.
    """
    from cable_attn.bench import training as bench
    from cable_attn.bench.records import append
    from cable_attn.environment import environment

    wanted = [size.strip() for size in sizes.split(",")]
    for size in wanted:
        require_known("size", size, ["tiny", "small", "medium"])
    names = [name.strip() for name in encodings.split(",")] if encodings else [*bench.ENCODINGS, bench.MATERIALISED]
    around = environment()
    for row in bench.run(wanted, names, steps, overrides or []):
        append(results, [{**row, **around}])
        told = row.get("error") or f"{row['tokens_per_second']:>12,.0f} tokens/s   peak {row['peak_mib'] or 0:>7,} MiB"
        console.print(f"{row['size']:>7} {row['encoding']:>20} {told}", markup=False, highlight=False)
    console.print(f"Rows added to {results}", markup=False, highlight=False)


@bench_app.command(name="pruning")
def bench_pruning(
    checkpoint: Annotated[Path, typer.Argument(help="A trained model's folder (cable, cable-nw, fox or alibi).")],
    text: Annotated[Path, typer.Argument(help="A text for its tokenizer, or a .npy file of token ids.")],
    lengths: Annotated[str, typer.Option(help="Tokens, with commas between.")] = "16384,65536",
    epsilon: Annotated[float, typer.Option(help="The weight that a row may lose.")] = 1e-4,
    results: Annotated[Path, typer.Option(help="JSONL file to which the rows are added.")] = Path(
        "benchmarks/results/pruning.jsonl"
    ),
) -> None:
    """What prune=ε saves on a trained model's own queries, keys and biases, beside cuDNN without a bias.

    Needs a GPU. The time of the bounds counts.
    """
    import numpy as np

    from cable_attn.bench import pruning as bench
    from cable_attn.bench.records import append, pruning_markdown
    from cable_attn.data import encode, read_texts
    from cable_attn.environment import environment
    from cable_attn.models.loading import load_causal_lm, load_model

    if text.suffix == ".npy":
        model, tokens = load_model(checkpoint), np.load(text, allow_pickle=False)
    else:
        model, tokenizer = load_causal_lm(checkpoint)
        tokens = encode(read_texts(text), tokenizer)
    around = environment()
    rows = []
    for row in bench.run(model, tokens, _numbers(lengths), epsilon, console.print):
        rows.append({**row, **around})
        append(results, rows[-1:])
    console.print(pruning_markdown(rows), highlight=False, soft_wrap=True)
    console.print(f"Rows added to {results}", markup=False, highlight=False)


@bench_app.command(name="report")
def bench_report(
    results: Annotated[Path, typer.Option(help="Folder of the JSONL files.")] = Path("benchmarks/results"),
    docs: Annotated[Path, typer.Option(help="Folder of the documents whose tables are made anew.")] = Path("docs"),
) -> None:
    """Make the tables and figures of docs/kernels.md and docs/training.md from the stored measurements."""
    from cable_attn.bench import records
    from cable_attn.files import write_atomically
    from cable_attn.report import speed_figure, training_figure

    written = []
    for page in (docs / "kernels.md", docs / "training.md"):
        write_atomically(page, records.fill(page.read_text(encoding="utf-8"), results))
        written.append(page)
    written += speed_figure(records.latest(records.read(results / "attention.jsonl")), docs / "attention")
    if (results / "training.jsonl").exists():
        rows = records.latest_by_size(records.read(results / "training.jsonl"))
        written += training_figure(rows, docs / "training")
    console.print("Written:", *written, highlight=False)


def _shapes(text: str) -> tuple[Any, ...]:
    from cable_attn.bench.attention import Shape

    parsed = []
    for part in text.split(";"):
        numbers = part.split(",")
        if len(numbers) != 4 or not all(number.strip().isdigit() for number in numbers):
            raise CableError(f"--shapes wants batch,heads,tokens,dim like 16,16,1024,64, got {part!r}.")
        parsed.append(Shape(*map(int, numbers)))
    return tuple(parsed)


def _bench_line(row: dict[str, Any]) -> str:
    shape = ",".join(str(number) for number in row["shape"].values())
    if "error" in row:
        return f"{shape:>16} {row['peer']:>14}   {escape(row['error'])}"
    return (
        f"{shape:>16} {row['peer']:>14}   forward {row['forward_ms']:8.3f} ms   "
        f"forward+backward {row['both_ms']:8.3f} ms   peak {row['peak_mib']:7.0f} MiB"
    )


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isdigit() or int(part) < 1]
    if wrong or not parts:
        raise CableError(f"--lengths wants whole numbers like 128,512, got {wrong[0] if wrong else text!r}.")
    return sorted({int(part) for part in parts})


@app.command(name="encodings")
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


if __name__ == "__main__":
    main()
