"""Measurements as they are stored: one JSON line each, with what is needed to trust it."""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cable_attn.errors import CableError
from cable_attn.tables import markdown_table


def read(path: Path) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise CableError(f"{str(path)!r} does not hold one JSON object a line: {error}.") from error
    if not rows:
        raise CableError(f"{str(path)!r} holds no measurement yet.")
    return rows


def latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the last commit at which anything could be measured."""
    measured = [row for row in rows if "error" not in row] or rows
    return [row for row in rows if row.get("commit") == measured[-1].get("commit")]


def latest_by_size(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of the last commit at which each size of model was measured; the smallest size first."""
    sizes = dict.fromkeys(row["size"] for row in sorted(rows, key=lambda row: int(row.get("parameters", 0))))
    return [row for size in sizes for row in latest([row for row in rows if row["size"] == size])]


def latest_by_model(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each model and length those of the last run, at the model's last commit; and RoPE's of the same runs."""
    rows = [named(row) for row in rows if "error" not in row]
    commits = {(row["model"], row["batch"]): row.get("commit") for row in rows}
    last = {
        (row["model"], row["batch"], row["length"]): _run(row)
        for row in rows
        if row.get("commit") == commits[row["model"], row["batch"]]
    }
    shown = set(last.values())
    return fastest(
        row
        for row in rows
        if _run(row) == last.get((row["model"], row["batch"], row["length"]))
        or (_is_rope(row["model"]) and _run(row) in shown)
    )


def fastest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each run, model and length: of several processes the fastest one's numbers."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((*_run(row), row["model"], row["length"]), []).append(row)
    for same in found.values():
        same.sort(key=lambda row: -(row.get("ms") or row["seconds_to_first_token"]))
    return [dict(ChainMap(*reversed(same))) for same in found.values()]  # one of them has compared texts


def _run(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("commit"), row.get("begun"), row["batch"], row.get("precision")


def _is_rope(model: str) -> bool:
    return re.match(r"rope\b", model) is not None


def attention_markdown(rows: list[dict[str, Any]]) -> str:
    """Milliseconds forward / forward+backward for each shape, and the ratio of CABLE to each peer; the last run."""
    rows = latest(rows)
    names = list(dict.fromkeys(row["peer"] for row in rows))
    lines = ["| B,H,T,D | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    shapes = list(dict.fromkeys(tuple(row["shape"].values()) for row in rows))
    for shape in shapes:
        found = {row["peer"]: row for row in rows if tuple(row["shape"].values()) == shape and "error" not in row}
        cells = []
        for name in names:
            row = found.get(name)
            if row is None:
                cells.append("–")
                continue
            cell = f"{row['forward_ms']:.2f} / {row['both_ms']:.2f}"
            if name != "cable" and "cable" in found:
                ours = found["cable"]
                ratio = (ours["forward_ms"] / row["forward_ms"], ours["both_ms"] / row["both_ms"])
                cell += f" ({ratio[0]:.2f} / {ratio[1]:.2f})"
            cells.append(cell)
        lines.append(f"| {','.join(map(str, shape))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pruning_markdown(rows: list[dict[str, Any]]) -> str:
    """All layers of a model together, by length; milliseconds forward / forward+backward; the last run."""
    rows = list({(row["tokens"], row["layer"]): row for row in latest(rows)}.values())
    lines = ["| tokens | blocks kept | cuDNN, no bias | fused | fused and pruned | cuDNN / pruned |", "|---" * 6 + "|"]
    for tokens in sorted({row["tokens"] for row in rows}):
        layers = [row for row in rows if row["tokens"] == tokens]
        kept = sum(row["kept"] for row in layers) / len(layers)
        times = {
            name: [sum(row[f"{name}{what}"] for row in layers) for what in ("_ms", "_both_ms")]
            for name in ("cudnn", "whole", "pruned")
        }
        cells = " | ".join(f"{alone:.2f} / {both:.2f}" for alone, both in times.values())
        gain = " / ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(times["cudnn"], times["pruned"]))
        lines.append(f"| {tokens} | {kept:.0%} | {cells} | {gain} |")
    return "\n".join(lines)


def tuning_markdown(rows: list[dict[str, Any]]) -> str:
    """The best tile of each kernel, by what was tried."""
    columns = list(dict.fromkeys((tuple(row["shape"].values()), row["kernel"]) for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = ["| B,H,T,D | kernel | " + " | ".join(variants) + " |", "|---" * (len(variants) + 2) + "|"]
    for shape, kernel in columns:
        cells = []
        for variant in variants:
            same = [
                r for r in rows if (tuple(r["shape"].values()), r["kernel"], r["variant"]) == (shape, kernel, variant)
            ]
            cells.append(f"{same[0]['ms']:.3f} ({'×'.join(map(str, same[0]['tile'][:2]))})" if same else "–")
        lines.append(f"| {','.join(map(str, shape))} | {kernel} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def training_markdown(rows: list[dict[str, Any]]) -> str:
    """Thousand tokens per second, over RoPE's, the share of the GPU's peak, and peak memory; the fastest first."""
    rows = latest_by_size(rows)
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = ["| encoding | " + " | ".join(sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    found = {(row["encoding"], row["size"]): row for row in rows if "error" not in row}
    fastest_first = sorted(found.values(), key=lambda row: (row["size"] != sizes[0], -row["tokens_per_second"]))
    for encoding in dict.fromkeys(row["encoding"] for row in [*fastest_first, *rows]):
        cells = [_training_cell(found.get((encoding, size)), found.get(("rope", size))) for size in sizes]
        lines.append(f"| {encoding} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _training_cell(row: dict[str, Any] | None, rope: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    cell = f"{row['tokens_per_second'] / 1e3:,.0f}k"
    if rope is not None:
        cell += f" ({row['tokens_per_second'] / rope['tokens_per_second']:.2f})"
    if row.get("mfu"):
        cell += f", {row['mfu']:.0%}"
    if row.get("peak_mib"):
        cell += f", {row['peak_mib'] / 1024:.1f} GiB"
    return cell


def decode_markdown(rows: list[dict[str, Any]]) -> str:
    """Tokens per second, over RoPE's, and peak memory at each length of the prompt; then how texts compared."""
    table = _by_length(rows, "tokens_per_second", "{:,.0f}", lambda ours, ropes: ours / ropes)
    compared = [row for row in latest_by_model(rows) if row.get("compared")]
    return "\n".join([table, *([""] if compared else []), *map(_texts, compared)])


def _texts(row: dict[str, Any]) -> str:
    told = f"- {row['model']}, {row['compared']} tokens behind {row['length']:,}: "
    told += f"{row['as_dynamic']} as with a dynamic cache before the first that is not"
    return told + (f"; {row['as_unpruned']} as without pruning" if "as_unpruned" in row else "")


def prefill_markdown(rows: list[dict[str, Any]]) -> str:
    """Seconds to the first token, RoPE's over them, and peak memory at each length of the prompt."""
    return _by_length(rows, "seconds_to_first_token", "{:.3f} s", lambda ours, ropes: ropes / ours)


def _by_length(rows: list[dict[str, Any]], key: str, shape: str, faster: Callable[[float, float], float]) -> str:
    """A line for each model and number of texts; what is told of RoPE is its best of the same run."""
    rows = latest_by_model(rows)
    lengths = sorted({row["length"] for row in rows})
    lines = ["| model | texts | " + " | ".join(f"{length:,}" for length in lengths) + " | run |"]
    lines.append("|---" * (len(lengths) + 3) + "|")

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "–"
        told = shape.format(row[key])
        same = [other for other in rows if _run(other) == _run(row) and other["length"] == row["length"]]
        ropes = [faster(row[key], other[key]) for other in same if _is_rope(other["model"])]
        told += f" ({min(ropes):.2f})" if ropes else ""
        return told + (f", {row['peak_mib'] / 1024:.1f} GiB" if row.get("peak_mib") else "")

    def line(row: dict[str, Any]) -> tuple[Any, ...]:
        return row.get("commit"), row["model"], row["batch"]

    for own in dict.fromkeys(map(line, rows)):
        found = {row["length"]: row for row in rows if line(row) == own}
        cells = [cell(found.get(length)) for length in lengths]
        lines.append(f"| {own[1]} | {own[2]} | " + " | ".join(cells) + f" | {(own[0] or '–')[:7]} |")
    return "\n".join(lines)


def encoding_markdown(rows: list[dict[str, Any]]) -> str:
    """Documents per second of each encoder, in the order in which they were measured."""
    header = ("encoder", "tokens at most", "documents", "documents/s", "GPU", "commit")
    lines = [
        (row["encoding"], f"{row['max_length']:,}", f"{row['documents']:,}", f"{row['documents_per_second']:.1f}",
         row["gpu"], row["commit"])
        for row in rows
    ]  # fmt: skip
    return markdown_table(header, lines)


def forget_markdown(rows: list[dict[str, Any]]) -> str:
    """What a forgetting cache holds each time the text has doubled."""
    rows = latest(rows)
    last = rows[-1]
    doubled = [row for row in rows if (row["tokens"] // rows[0]["tokens"]).bit_count() == 1] or rows
    shown = doubled if doubled[-1] is last else [*doubled, last]
    lines = [
        (f"{row['tokens']:,}", f"{row['mib']:.1f}", f"{row['full_mib']:.1f}", ", ".join(map(str, row["kept"])))
        for row in shown
    ]
    told = markdown_table(("tokens read", "MiB", "MiB of a cache that keeps all", "keys in each layer"), lines)
    return f"{told}\n\nThe next {last['compared']} tokens: {last['as_full']} are the same before the first that is not."


FP32 = ", fp32"


def named(row: dict[str, Any]) -> dict[str, Any]:
    """Other precisions and other ways to read are other models."""
    own = FP32 if row.get("precision") == "fp32" else ""
    own += f", {row['piece']:,} at a time" if row.get("piece") else ""
    return {**row, "model": row["model"] + own}


TABLES = {
    "forget": forget_markdown,
    "encoding": encoding_markdown,
    "attention": attention_markdown,
    "pruning": pruning_markdown,
    "tuning": tuning_markdown,
    "training": training_markdown,
    "decode": decode_markdown,
    "prefill": prefill_markdown,
}


def fill(page: str, results: Path) -> str:
    """A document with each table between ``<!-- NAME -->`` and ``<!-- end -->`` made from ``results/NAME.jsonl``."""

    def table(found: re.Match[str]) -> str:
        name = found.group(1)
        return f"<!-- {name} -->\n{TABLES[name](read(results / f'{name}.jsonl'))}\n<!-- end -->"

    return re.sub(rf"<!-- ({'|'.join(TABLES)}) -->.*?<!-- end -->", table, page, flags=re.DOTALL)


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a results file; what is there stays."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
