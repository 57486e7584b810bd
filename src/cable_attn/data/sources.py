"""Where texts come from: the embedded corpus, local files, or a dataset of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cable_attn.data.corpus import EMBEDDED, Document, embedded_corpus, hold_out, read_text
from cable_attn.errors import CableError, reason, unknown
from cable_attn.files import read_jsonl

READABLE = (".txt", ".md", ".jsonl", ".parquet")
ROWS = (".jsonl", ".parquet")
"""With many documents in a file; in other files a text is all there is."""
OTHER_ROWS = (".csv", ".tsv", ".json")
HELD_OUT = 0.01


@dataclass(frozen=True)
class HubDataset:
    """A dataset by short name, and how its splits are taken."""

    id: str
    config: str | None
    splits: dict[str, str]
    """Our split → the dataset's."""
    held_out: float = 0.0
    """The share of documents of the one split that goes to validation."""
    heading: str | None = None
    """Rows are lines; one that matches, behind an empty one, begins a new document."""


HUB = {
    "fineweb-edu": HubDataset("HuggingFaceFW/fineweb-edu", "sample-10BT", {"train": "train"}, held_out=0.01),
    "fineweb-1b": HubDataset("HuggingFaceFW/fineweb", "sample-10BT", {"test": "train"}),
    "wikitext-103": HubDataset(
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        {"train": "train", "validation": "validation", "test": "test"},
        heading=r" = [^=].* = \n?$",
    ),
}
"""fineweb-edu gives the paper's 9.9B/0.1B tokens; fineweb-1b is cut with --tokens 1000000000."""

Stream = Callable[[int], Iterator[Document]]
"""``stream(n)``: the documents from the n-th on, always in the same order."""


def open_source(name: str, column: str = "text", held_out: float | None = None) -> dict[str, Stream]:
    """Split → stream of documents.

    name: ``embedded``, a short name (HUB), a file or folder (.txt, .md, .jsonl, .parquet), or a dataset ``owner/name``.
    held_out: the share of documents for validation where the source has no such split; every so-manieth document. Of
        few text files it is one at least, of a single one its end.
    """
    if name == "embedded":
        return {split: _embedded(split) for split in EMBEDDED}
    if name in HUB:
        return _hub_streams(HUB[name], column, held_out)
    path = Path(name)
    if path.exists():
        return _local_streams(path, column, HELD_OUT if held_out is None else held_out)
    if name.count("/") == 1 and not name.startswith((".", "/")):
        return _hub_streams(HubDataset(name, None, {"train": "train"}, HELD_OUT), column, held_out)
    raise unknown("source", name, ["embedded", *HUB, "a file or folder", "a dataset id owner/name"])


def _embedded(split: str) -> Stream:
    return _skip(lambda: iter(embedded_corpus(split)))


def _local_streams(path: Path, column: str, share: float) -> dict[str, Stream]:
    documents = _skip(lambda: _local(path, column))
    streams = _hold_out(documents, share)
    files = _files(path)
    if share == 0 or any(file.suffix.lower() in ROWS for file in files):
        return streams
    if len(files) > 1:
        return _hold_out(documents, max(share, math.ceil(1e6 / len(files)) / 1e6))

    def part(n: int) -> Stream:
        return _skip(lambda: iter(hold_out(list(documents(0)), share)[n]))

    return {"train": part(0), "validation": part(1)}


def _skip(documents: Callable[[], Iterator[Document]]) -> Stream:
    return lambda start: islice(documents(), start, None)


def _hold_out(stream: Stream, share: float) -> dict[str, Stream]:
    """Documents are held out at even distances, so that no split needs to know how many there are."""
    if not 0 <= share < 1:
        raise CableError(f"held_out must be at least 0 and below 1, got {share}.")
    if share == 0:
        return {"train": stream}
    millionths = max(round(share * 1e6), 1)

    def is_held(n: int) -> bool:
        return (n + 1) * millionths // 10**6 > n * millionths // 10**6

    def part(held: bool) -> Stream:
        def documents() -> Iterator[Document]:
            return (d for n, d in enumerate(stream(0)) if is_held(n) == held)

        return _skip(documents)

    return {"train": part(False), "validation": part(True)}


def state_of(source: str) -> str | None:
    """A hash of the names, sizes and times of a local source's files: another one when they have changed."""
    path = Path(source)
    if not path.exists():
        return None
    stats = [(file.relative_to(path).as_posix(), file.stat()) for file in _files(path)]
    told = "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in stats)
    return hashlib.sha256(told.encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.suffix.lower() in READABLE) if path.is_dir() else [path]


def _local(path: Path, column: str) -> Iterator[Document]:
    paths = _files(path)
    if not paths:
        raise CableError(f"folder {str(path)!r} has no file of a kind that can be read: {', '.join(READABLE)}.")
    for file in paths:
        suffix = file.suffix.lower()
        if suffix == ".jsonl":
            yield from _jsonl(file, column)
        elif suffix == ".parquet":
            yield from _parquet(file, column)
        elif suffix in OTHER_ROWS:
            raise CableError(f"{str(file)!r} holds rows, not a text. Make a .jsonl or a .parquet file of it.")
        else:
            yield Document(file.name, read_text(file))


def _jsonl(path: Path, column: str) -> Iterator[Document]:
    for number, row in read_jsonl(path):
        yield Document(f"{path.name}:{number}", _text(row, column, f"{path}, line {number}"))


def _parquet(path: Path, column: str) -> Iterator[Document]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise CableError("parquet files need pyarrow: pip install 'cable-attn[data]'.") from error
    number = 0
    try:
        batches = parquet.ParquetFile(path).iter_batches()
    except (OSError, ValueError) as error:  # pyarrow's are such
        raise CableError(f"{str(path)!r} is no parquet file: {reason(error)}.") from error
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Document(f"{path.name}:{number}", _text(row, column, f"{path}, row {number}"))


def _text(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise CableError(f"{where}: no text in column {column!r} (found: {found}). Name it with --column.")
    return str(row[column])


def _hub_streams(dataset: HubDataset, column: str, held_out: float | None) -> dict[str, Stream]:
    streams = {ours: _hub_stream(dataset, theirs, column) for ours, theirs in dataset.splits.items()}
    if "train" in streams and "validation" not in streams:
        share = dataset.held_out if held_out is None else held_out
        streams |= _hold_out(streams["train"], share)
    return streams


def _hub_stream(dataset: HubDataset, split: str, column: str) -> Stream:
    def articles() -> Iterator[Document]:
        lines = (_text(row, column, dataset.id) for row in _load(dataset, split))
        return join_lines(lines, dataset.heading or "", f"{dataset.id}:{split}")

    if dataset.heading is not None:
        return _skip(articles)

    def stream(start: int) -> Iterator[Document]:
        rows = _load(dataset, split)
        for n, row in enumerate(rows.skip(start) if start else rows, start):
            yield Document(f"{dataset.id}:{split}:{n}", _text(row, column, f"{dataset.id}, row {n}"))

    return stream


def join_lines(lines: Iterable[str], heading: str, name: str) -> Iterator[Document]:
    """Lines as documents, a new one at each heading; only behind an empty line, for a formula may look like one."""
    gathered: list[str] = []
    count = 0
    for line in lines:
        behind_empty = not gathered or not gathered[-1].strip()
        if behind_empty and re.match(heading, line) and "".join(gathered).strip():
            yield Document(f"{name}:{count}", "".join(gathered))
            gathered, count = [], count + 1
        gathered.append(line)
    if "".join(gathered).strip():
        yield Document(f"{name}:{count}", "".join(gathered))


def _load(dataset: HubDataset, split: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CableError("datasets of the hub need the package datasets: pip install 'cable-attn[data]'.") from error
    try:
        return load_dataset(dataset.id, dataset.config, split=split, streaming=True)
    except Exception as error:  # the hub's errors are many and say little
        where = f"https://huggingface.co/datasets/{dataset.id}"
        what = f"config {dataset.config!r}, " if dataset.config else ""
        raise CableError(
            f"dataset {dataset.id!r} ({what}split {split!r}) cannot be read: {type(error).__name__}. "
            f"Without a network, fetch its parquet files from {where} and give their folder as the source."
        ) from error
