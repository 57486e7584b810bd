"""``cable eval``: perplexity over lengths, passkey, and the tasks of the evaluation harness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from cable_attn.cli.common import console, names, numbers, say, working
from cable_attn.errors import CableError

MULTIPLES = (0.5, 1, 2, 4, 8, 15)
"""Of the training length, as in the paper."""


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[str, typer.Argument(help="A run folder, or any causal language model on disk or hub.")],
    text: Annotated[
        Path | None, typer.Option(help="A text file or a folder of .txt files; default: the embedded test novel.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Token shards of cable data prepare, instead of a text.")] = None,
    split: Annotated[str, typer.Option(help="Of the shards; default: validation.")] = "",
    lengths: Annotated[
        str, typer.Option(help="Tokens to read at once, with commas between; default: 1/2 to 15 × the training length.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=0, help="At most about so many tokens to predict; 0: all.")] = 1_000_000,
    same_tokens: Annotated[
        bool, typer.Option("--same-tokens", help="Only tokens that every length predicts: equal targets.")
    ] = False,
    stride: Annotated[int, typer.Option(min=0, help="Sliding window: so many new tokens a step; 0: side by side.")] = 0,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that the model reads in one batch.")] = 16384,
    by_place: Annotated[bool, typer.Option("--by-place", help="Also the loss by place in the longest window.")] = False,
    passkey: Annotated[int, typer.Option(min=0, help="Passkey texts for each length and depth; 0: none.")] = 0,
    form: Annotated[str, typer.Option(help="What is hidden in them: passkey or needle.")] = "passkey",
    tasks: Annotated[str, typer.Option(help="Tasks of lm-evaluation-harness, like hellaswag,lambada.")] = "",
    task_folder: Annotated[Path | None, typer.Option(help="Where their files are, to work offline.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of each task only the first so many items.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file for results and what they depend on; figures beside it.")
    ] = None,
) -> None:
    """Perplexity at many lengths; on request passkey retrieval and the tasks of lm-evaluation-harness.

    Windows lie side by side, as in the paper. Logits never exist for a whole window: 131072 tokens at once are fine.

    ```
    A run of the demo:       cable eval runs/demo/cable-0 --same-tokens
    Token shards:            cable eval runs/mine --data data/wikitext-103 --lengths 1024,16384
    Passkey, 10 texts each:  cable eval runs/mine --passkey 10 --lengths 1024,8192 --out results.json
    HellaSwag and LAMBADA:   cable eval runs/mine --tasks hellaswag,lambada --task-folder files/
    ```
    """
    from cable_attn.environment import environment
    from cable_attn.evaluation import require_own_tokens
    from cable_attn.files import writable_file
    from cable_attn.harness import require_tasks
    from cable_attn.passkey import FORMS

    if form not in FORMS:
        raise CableError(f"--form must be one of {', '.join(FORMS)}, got {form!r}.")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in context.params.items()}
    if out is not None:
        writable_file(out)
    wanted = numbers(lengths) if lengths else []
    if tasks:
        require_tasks(names(tasks, "--tasks"), task_folder)
    model, tokenizer, digest = _load(checkpoint, need_tokenizer=data is None or passkey > 0 or bool(tasks))
    if data is not None and tokenizer is not None:
        require_own_tokens(tokenizer, data, checkpoint)
    held_out = _held_out(text, data, split, tokens, tokenizer)
    _require_readable(held_out, model)
    wanted = wanted or _default_lengths(model, len(held_out.tokens))
    result: dict[str, Any] = {
        "checkpoint": checkpoint,
        "checkpoint_sha256": digest,
        "data": {"source": held_out.source, "sha256": held_out.sha256},
        "settings": {**settings, "lengths": wanted},
        **environment(),
    }
    with working() as progress:
        result["perplexity"] = _perplexity(progress, model, held_out, wanted, stride, same_tokens, batch_tokens)
    console.print(_perplexity_table(checkpoint, result["perplexity"]))
    _store(out, result)
    if by_place:
        console.print(_place_table(result["perplexity"][-1]))
    if passkey:
        with working() as progress:
            result["passkey"] = _passkey(progress, model, tokenizer, held_out, wanted, passkey, form)
        console.print(_passkey_table(result["passkey"]))
        _store(out, result)
        if out is not None and any("error" not in row for row in result["passkey"]):
            _draw_passkey({checkpoint: result["passkey"]}, out.with_name(f"{out.stem}-passkey"))
    if tasks:
        from cable_attn.harness import run_tasks

        result["tasks"] = run_tasks(model, tokenizer, names(tasks, "--tasks"), task_folder, limit)
        console.print(_task_table(result["tasks"]))
        _store(out, result)
    if out is not None:
        say(f"Results: {out}")


def _store(out: Path | None, result: dict[str, Any]) -> None:
    """After each part: what fails later does not lose what came before."""
    from cable_attn.files import write_json

    if out is not None:
        write_json(out, result)


def _load(checkpoint: str, need_tokenizer: bool) -> tuple[Any, Any, str]:

    from cable_attn.devices import best_device
    from cable_attn.evaluation import checkpoint_hash
    from cable_attn.models.loading import checkpoint_folder, load_causal_lm, load_model, tokenizer_of

    folder = checkpoint_folder(checkpoint)
    model, tokenizer = load_causal_lm(folder) if need_tokenizer else (load_model(folder), tokenizer_of(folder))
    return model.to(best_device()), tokenizer, checkpoint_hash(folder)


def _held_out(text: Path | None, data: Path | None, split: str, tokens: int, tokenizer: Any) -> Any:
    from cable_attn.data import read_texts
    from cable_attn.evaluation import find_held_out, from_texts

    if text is not None and data is not None:
        raise CableError("give --text or --data, not both.")
    if split and data is None:
        raise CableError(f"--split {split} is of token shards, and none are given. Add --data.")
    if text is None:
        return find_held_out("embedded" if data is None else str(data), split or "validation", tokens, tokenizer)
    found = from_texts(read_texts(text), tokenizer, str(text))
    return found.first(tokens + 1) if tokens else found


def _require_readable(held_out: Any, model: Any) -> None:
    from cable_attn.evaluation import require_known_tokens

    if len(held_out.tokens) < 2:
        raise CableError(
            f"{held_out.source!r} has {len(held_out.tokens)} tokens, and two are the least that can be read. Give "
            "another --split, or hold more out with cable data prepare --held-out 0.1."
        )
    require_known_tokens(held_out.tokens, model, held_out.source)


def _default_lengths(model: Any, tokens: int) -> list[int]:
    trained_at = getattr(model.config, "max_position_embeddings", None) or 1024
    return [length for multiple in MULTIPLES if 0 < (length := int(trained_at * multiple)) < tokens] or [tokens - 1]


def _perplexity(
    progress: Progress, model: Any, held_out: Any, lengths: list[int], stride: int, same_tokens: bool, batch_tokens: int
) -> list[dict[str, Any]]:
    from cable_attn.evaluation import evaluate

    bars = {n: progress.add_task(str(n), total=len(held_out.tokens) - 1, what="reading") for n in lengths}
    rows = evaluate(
        model,
        held_out,
        lengths,
        stride=stride or None,
        same_tokens=same_tokens,
        batch_tokens=batch_tokens,
        watch=lambda length, count: progress.advance(bars[length], count),
    )
    for row in rows:
        progress.update(bars[row["length"]], total=1, completed=1, what=row.get("error", "done"))
    return rows


def _perplexity_table(checkpoint: str, rows: list[dict[str, Any]]) -> Table:
    columns = ("tokens at once", "perplexity", "95 %", "bits per byte", "tokens", "seconds", "peak MiB on the GPU")
    on_gpu = any("peak_memory_mib" in row for row in rows)
    table = Table(*columns[: None if on_gpu else -1], title=checkpoint)
    for row in rows:
        if "error" in row:
            table.add_row(str(row["length"]), row["error"])
            continue
        interval = "–" if row["interval"] is None else "{:.2f} – {:.2f}".format(*row["interval"])
        bits = "–" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        cells = [str(row["length"]), f"{row['perplexity']:.2f}", interval, bits, f"{row['tokens']:,}"]
        memory = [f"{row['peak_memory_mib']:,}"] if on_gpu else []
        table.add_row(*cells, f"{row['seconds']:.1f}", *memory)
    return table


def _place_table(row: dict[str, Any]) -> Table:
    table = Table("place in the window, up to", "loss", title=f"{row['length']} tokens at once")
    for place, loss in row.get("by_place", []):
        table.add_row(str(place), f"{loss:.4f}")
    return table


def _passkey(
    progress: Progress, model: Any, tokenizer: Any, held_out: Any, lengths: list[int], samples: int, form: str
) -> list[dict[str, Any]]:
    from cable_attn.passkey import DEPTHS, Task, measure

    total = {n: n * samples * len(DEPTHS) for n in lengths}
    bars = {n: progress.add_task(str(n), total=total[n], what=form) for n in lengths}
    return measure(
        model,
        Task(tokenizer, form),
        held_out.tokens,
        lengths,
        DEPTHS,
        samples,
        watch=lambda length, count: progress.advance(bars[length], count),
    )


def _passkey_table(rows: list[dict[str, Any]]) -> Table:
    unread = {row["length"]: row["error"] for row in rows if "error" in row}
    rows = [row for row in rows if "error" not in row]
    depths = sorted({row["depth"] for row in rows})
    table = Table("tokens", *(f"depth {depth:.0%}" for depth in depths), title="found")
    for length in sorted({row["length"] for row in rows}):
        found = {row["depth"]: row["accuracy"] for row in rows if row["length"] == length}
        table.add_row(str(length), *(f"{found[depth]:.0%}" for depth in depths))
    if unread:
        table.caption = "; ".join(f"{length}: {error}" for length, error in unread.items())
    return table


def _draw_passkey(found: dict[str, list[dict[str, Any]]], stem: Path) -> None:
    from cable_attn.report import passkey_figure

    try:
        say("Figure: " + ", ".join(str(path) for path in passkey_figure(found, stem)))
    except ImportError:
        say("No figure: matplotlib is missing. pip install 'cable-attn[plot]'")


def _task_table(results: dict[str, dict[str, float]]) -> Table:
    table = Table("task", "metric", "value")
    for task, metrics in results.items():
        for metric, value in metrics.items():
            table.add_row(task, metric, f"{value:.4f}")
    return table
