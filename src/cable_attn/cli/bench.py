"""``cable bench``: speed and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from cable_attn.cli.common import console, names, numbers
from cable_attn.errors import CableError, require_known

SIZES = ("tiny", "small", "medium")
bench_app = typer.Typer(
    help="Measure speed and memory beside the peers, behind a correctness gate.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _writable(results: Path) -> Path:
    from cable_attn.files import writable_file

    return writable_file(results)


Results = Annotated[Path, typer.Option(help="JSONL file to which the rows are added.", callback=_writable)]


def _keep(
    rows: Iterable[dict[str, Any]], results: Path, around: dict[str, Any], tell: Callable[[dict[str, Any]], str]
) -> list[dict[str, Any]]:
    """Store and show rows as they come; that nothing could be measured is an exit code of 1."""
    from cable_attn.bench.records import append

    kept = []
    for row in rows:
        kept.append({**row, **around})
        append(results, kept[-1:])
        if told := tell(row):
            console.print(told, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Rows added to {results}", markup=False, highlight=False)
    if all("error" in row for row in kept):
        raise typer.Exit(1)
    return kept


@bench_app.command(name="attention")
def bench_attention(
    shapes: Annotated[
        str, typer.Option(help="batch,heads,tokens,dim, several with ';' between; default: the four standard ones.")
    ] = "",
    results: Results = Path("benchmarks/results/attention.jsonl"),
) -> None:
    """Fused CABLE attention against SDPA (flash, cuDNN), FlexAttention, a materialised bias and others.

    Needs a GPU. Prints GPU times in milliseconds and adds a JSON line for each row, with commit, GPU and versions.
    """
    from cable_attn.bench import attention as bench
    from cable_attn.environment import environment

    wanted = tuple(_shape(part, "--shapes") for part in shapes.split(";")) if shapes else bench.SHAPES
    _keep(bench.run(wanted, console.print), results, environment(), _bench_line)
    console.print("cable bench report makes the table and the figure of them.")


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
    for row in bench.run(_shape(shape, "--shape"), bias, console.print):
        rows.append(row)
        console.print(f"{row['kernel']:>8} {tuple(row['tile'])} {row['ms']:.3f} ms", highlight=False)
    entry = bench.best(rows)
    known = read_json(out, list) if out.exists() else []
    same = [(old["dim"], old["kernel"]) == (entry["dim"], entry["kernel"]) for old in known]
    write_json(out, [old for old, is_same in zip(known, same) if not is_same] + [entry])
    console.print(f"Written: {out}. Use it with CABLE_TILES={out}", markup=False, highlight=False)


@bench_app.command(name="train")
def bench_train(
    sizes: Annotated[str, typer.Option(help="Of tiny, small, medium, with commas between.")] = "tiny,small,medium",
    encodings: Annotated[str, typer.Option(help="Names, with commas between; default: the paper's.")] = "",
    steps: Annotated[int, typer.Option(min=20, help="Updates of each cell; the second half counts.")] = 60,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value for every cell's recipe.")] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Cells that start and compile at the same time; they are measured one by one.")
    ] = 1,
    results: Results = Path("benchmarks/results/training.jsonl"),
) -> None:
    """Tokens per second and peak memory of training with each encoding, through cable train.

    The default list ends with CABLE as the authors' code does it, with a materialised bias.
    """
    from cable_attn.bench import training as bench
    from cable_attn.devices import require_gpu
    from cable_attn.environment import environment

    if not overrides:  # which may make them small enough for a CPU
        require_gpu("cable bench train, at its own sizes,")
    wanted = names(sizes, "--sizes")
    for size in wanted:
        require_known("size", size, SIZES)
    chosen = names(encodings, "--encodings") if encodings else [*bench.ENCODINGS, bench.MATERIALISED]

    def told(row: dict[str, Any]) -> str:
        speed = row.get("error") or f"{row['tokens_per_second']:>12,.0f} tokens/s{_peak(row)}"
        return f"{row['size']:>7} {row['encoding']:>20} {speed}"

    _keep(bench.run(wanted, chosen, steps, overrides or [], jobs), results, environment(), told)


def _peak(row: dict[str, Any]) -> str:
    return f"   peak {row['peak_mib']:>7,} MiB" if row["peak_mib"] else ""  # a GPU's


Models = Annotated[
    list[str] | None,
    typer.Argument(help="Encodings, or folders of trained models; with a backend: rope@sdpa, rope@cudnn."),
]
Size = Annotated[str, typer.Option(help="Of the models with fresh weights: tiny, small or medium.")]
Lengths = Annotated[str, typer.Option(help="Tokens of the prompt, with commas between; default: 1024 to 131072.")]
Batch = Annotated[int, typer.Option(min=1, help="Texts at once.")]
Prune = Annotated[float, typer.Option(min=0, help="ε: measure what can be pruned so as well; 0: not.")]
Jobs = Annotated[int, typer.Option(min=1, help="Models that compile at the same time; they are measured one by one.")]
Repeats = Annotated[int, typer.Option(min=1, help="Processes for each model, if --jobs > 1; the fastest counts.")]
Prompts = Annotated[Path | None, typer.Option(exists=True, help="A .npy file of token ids; default: random ones.")]


@bench_app.command(name="decode")
def bench_decode(
    models: Models = None,
    size: Size = "medium",
    lengths: Lengths = "",
    batch: Batch = 1,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are timed.")] = 64,
    prune: Prune = 0.0,
    text: Prompts = None,
    compiled: Annotated[bool, typer.Option(help="Compile the step, replayed as a CUDA graph.")] = True,
    compare: Annotated[
        int, typer.Option(min=0, help="Also compare texts of so many tokens: with a dynamic cache, without pruning.")
    ] = 0,
    precision: Annotated[str, typer.Option(help="bf16 or fp32; default: bf16 on a GPU.")] = "",
    jobs: Jobs = 1,
    repeats: Repeats = 1,
    results: Results = Path("benchmarks/results/decode.jsonl"),
) -> None:
    """Tokens per second behind prompts of several lengths, one model after the other.

    ```
    cable bench decode rope cable                        medium models with fresh weights
    cable bench decode rope runs/medium --prune 1e-4     a trained one as well, pruned and not
    ```
    """
    own = ["--steps", str(steps), "--compiled" if compiled else "--no-compiled"]
    own += ["--precision", precision] if precision else []
    chosen = {"steps": steps, "compile": compiled, "compare": compare}
    command = ["decode", *own]
    _bench_generation(command, models, size, lengths, batch, prune, text, results, jobs, repeats, precision, chosen)


@bench_app.command(name="prefill")
def bench_prefill(
    models: Models = None,
    size: Size = "medium",
    lengths: Lengths = "",
    batch: Batch = 1,
    prune: Prune = 0.0,
    text: Prompts = None,
    piece: Annotated[int, typer.Option(min=0, help="Tokens read at once; 0: the whole prompt.")] = 0,
    jobs: Jobs = 1,
    repeats: Repeats = 1,
    results: Results = Path("benchmarks/results/prefill.jsonl"),
) -> None:
    """Seconds until the first new token, and peak memory, for prompts of several lengths."""
    command, chosen = ["prefill", "--piece", str(piece)], {"piece": piece}
    _bench_generation(command, models, size, lengths, batch, prune, text, results, jobs, repeats, "", chosen)


def _bench_generation(
    command: list[str], models: list[str] | None, size: str, lengths: str, batch: int, prune: float, text: Path | None,
    results: Path, jobs: int, repeats: int, precision: str, options: dict[str, Any],
) -> None:  # fmt: skip
    import torch

    from cable_attn.bench import generation as bench
    from cable_attn.environment import environment

    require_known("size", size, SIZES)
    precision = precision or ("bf16" if torch.cuda.is_available() else "fp32")
    require_known("precision", precision, bench.PRECISIONS)
    wanted = bench.choose(models or list(bench.ENCODINGS), size, prune or None)
    chosen = numbers(lengths) if lengths else list(bench.LENGTHS)
    if repeats > 1 and jobs == 1:
        raise CableError(f"--repeats={repeats} measures each model in several processes: give --jobs 2 or more.")
    if jobs > 1:
        told = ["--size", size, "--batch", str(batch), *([] if text is None else ["--text", str(text)])]
        counts = {key: options[key] for key in ("steps", "compare") if key in options}
        rows = bench.run_in_turn(wanted, chosen, [*command, *told], jobs, prune, repeats, **counts)
    else:
        tokens = None if text is None else torch.from_numpy(_token_ids(text))
        rows = bench.run(wanted, chosen, batch, tokens, precision=precision, **options)
    around = {"size": size, "begun": round(time.time()), **environment()}
    waits_for_turn = bench.TURN in os.environ  # one of several jobs: the command that started them compares texts
    _keep(rows if waits_for_turn else bench.compare_pruned(rows), results, around, _generation_line)


def _token_ids(path: Path) -> Any:
    import numpy as np

    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CableError(f"{str(path)!r} is not a .npy file of token ids: {error}") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise CableError(f"{str(path)!r} holds {ids.dtype} {list(ids.shape)}; token ids are integers in one row.")
    return ids.astype(np.int64)


def _generation_line(row: dict[str, Any]) -> str:
    speed = f"{row['tokens_per_second']:>10,.1f} tokens/s" if "tokens_per_second" in row else ""
    wait = f"{row['seconds_to_first_token']:>10.3f} s" if "seconds_to_first_token" in row else ""
    told = row.get("error") or f"{speed}{wait}{_peak(row)}"
    told += "".join(f"   {key} {row[key]}/{row['compared']}" for key in ("as_dynamic", "as_unpruned") if key in row)
    return f"{row['model']:>24} {row.get('length', 0):>7,} {told}"


@bench_app.command(name="forget")
def bench_forget(
    checkpoint: Annotated[Path, typer.Argument(help="A model that can forget: see docs/generation.md.")],
    text: Annotated[Path, typer.Argument(exists=True, help="A .npy file of token ids.")],
    epsilon: Annotated[float, typer.Option(help="The weight that a row may lose.")] = 1e-4,
    tokens: Annotated[int, typer.Option(min=1, help="Of the text to read.")] = 65536,
    piece: Annotated[int, typer.Option(min=1, help="Tokens read at once, and between two rows.")] = 1024,
    compare: Annotated[int, typer.Option(min=0, help="Tokens of the continuation to compare.")] = 256,
    results: Results = Path("benchmarks/results/forget.jsonl"),
) -> None:
    """How many keys a forgetting cache holds as a text goes on, beside a cache that keeps everything."""
    import torch

    from cable_attn.bench import generation as bench
    from cable_attn.environment import environment
    from cable_attn.evaluation import require_known_tokens
    from cable_attn.models.loading import load_model

    found = torch.from_numpy(_token_ids(text)[:tokens])[None]
    if found.shape[1] < tokens:
        raise CableError(f"{str(text)!r} has {found.shape[1]} tokens, --tokens={tokens} are wanted.")
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    model = bench.prepare(load_model(checkpoint), precision)
    require_known_tokens(found, model, str(text))
    around = {"model": str(checkpoint), "precision": precision, **environment()}
    rows = bench.forget(model, found.to(model.device), epsilon, piece, compare)
    whole = (row | bench.origin(checkpoint) if "as_full" in row else row for row in rows)

    def told(row: dict[str, Any]) -> str:
        read = f"{row['tokens']:>8,} read   {row['mib']:8.1f} MiB of {row['full_mib']:8.1f}   kept {row['kept']}"
        return read + (f"   as_full {row['as_full']}/{compare}" if "as_full" in row else "")

    _keep(whole, results, around, told)


@bench_app.command(name="pruning")
def bench_pruning(
    checkpoint: Annotated[Path, typer.Argument(help="A trained model's folder (cable, cable-nw, fox or alibi).")],
    text: Annotated[Path, typer.Argument(help="A text for its tokenizer, or a .npy file of token ids.")],
    lengths: Annotated[str, typer.Option(help="Tokens, with commas between.")] = "16384,65536",
    epsilon: Annotated[float, typer.Option(help="The weight that a row may lose.")] = 1e-4,
    results: Results = Path("benchmarks/results/pruning.jsonl"),
) -> None:
    """What prune=ε saves on a trained model's own queries, keys and biases, beside cuDNN without a bias.

    Needs a GPU. The time of the bounds counts.
    """

    from cable_attn.bench import pruning as bench
    from cable_attn.bench.records import pruning_markdown
    from cable_attn.data import encode, read_texts
    from cable_attn.environment import environment
    from cable_attn.evaluation import require_known_tokens
    from cable_attn.models.loading import load_causal_lm, load_model

    if text.suffix == ".npy":
        model, tokens = load_model(checkpoint), _token_ids(text)
    else:
        model, tokenizer = load_causal_lm(checkpoint)
        tokens = encode(read_texts(text), tokenizer)
    require_known_tokens(tokens, model, str(text))
    found = bench.run(model, tokens, numbers(lengths), epsilon, console.print)
    rows = _keep(found, results, environment(), lambda row: "")
    console.print(pruning_markdown(rows), highlight=False, soft_wrap=True)


@bench_app.command(name="report")
def bench_report(
    results: Annotated[Path, typer.Option(help="Folder of the JSONL files.")] = Path("benchmarks/results"),
    docs: Annotated[Path, typer.Option(help="Folder of the documents whose tables are made anew.")] = Path("docs"),
) -> None:
    """Make the tables and figures of the documents from the stored measurements."""
    from cable_attn.bench import records
    from cable_attn.files import write_atomically
    from cable_attn.report import forgetting_figure, generation_figure, speed_figure, training_figure

    written = []
    pages = (docs / name for name in ("kernels.md", "training.md", "generation.md", "retrieval.md"))
    for page in filter(Path.exists, pages):
        write_atomically(page, records.fill(page.read_text(encoding="utf-8"), results))
        written.append(page)
    if (results / "attention.jsonl").exists():
        written += speed_figure(records.latest(records.read(results / "attention.jsonl")), docs / "attention.svg")
    if (results / "training.jsonl").exists():
        rows = records.latest_by_size(records.read(results / "training.jsonl"))
        written += training_figure(rows, docs / "training.svg")
    generation = [results / name for name in ("decode.jsonl", "prefill.jsonl")]
    if all(path.exists() for path in generation):
        decode, prefill = (records.latest_by_model(records.read(path)) for path in generation)
        written += generation_figure(decode, prefill, docs / "generation.svg")
    if (results / "forget.jsonl").exists():
        written += forgetting_figure(records.latest(records.read(results / "forget.jsonl")), docs / "forgetting.svg")
    if not written:
        raise CableError(f"{str(results)!r} holds no measurements, and {str(docs)!r} no document to put them in.")
    console.print("Written:", *written, highlight=False)


def _shape(text: str, option: str) -> Any:
    from cable_attn.bench.attention import Shape

    sizes = text.split(",")
    if len(sizes) != 4 or not all(size.strip().isdecimal() for size in sizes):
        raise CableError(f"{option} wants batch,heads,tokens,dim like 16,16,1024,64, got {text!r}.")
    return Shape(*map(int, sizes))


def _bench_line(row: dict[str, Any]) -> str:
    shape = ",".join(str(number) for number in row["shape"].values())
    if "error" in row:
        return f"{shape:>16} {row['peer']:>14}   {row['error']}"
    return (
        f"{shape:>16} {row['peer']:>14}   forward {row['forward_ms']:8.3f} ms   "
        f"forward+backward {row['both_ms']:8.3f} ms   peak {row['peak_mib']:7.0f} MiB"
    )
