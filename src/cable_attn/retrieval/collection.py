"""Documents, queries and judgements in BEIR's layout, checked before an hour of encoding depends on them.

    FOLDER/corpus.jsonl      {"_id": …, "title": …, "text": …}
    FOLDER/queries.jsonl     {"_id": …, "text": …}
    FOLDER/qrels/test.tsv    query-id, corpus-id, score, with tabs between and a header

The JSONL files may be compressed (.gz, .bz2, .xz).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cable_attn.errors import CableError
from cable_attn.files import COMPRESSED, read_jsonl

SHOWN = 3


@dataclass(frozen=True)
class Collection:
    name: str
    documents: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, dict[str, int]]
    """query → document → how relevant."""
    notes: list[str]
    """What is odd about it, in words."""

    @property
    def sha256(self) -> str:
        """Of everything that results depend on."""
        digest = hashlib.sha256()
        for part in (self.documents, self.queries, self.relevant):
            for name in sorted(part):
                digest.update(json.dumps([name, part[name]], sort_keys=True).encode())
        return digest.hexdigest()


def find_collection(name: str, split: str = "test") -> Collection:
    """``embedded``, ``mldr`` (English, from the hub), or a folder in the layout of BEIR or MLDR."""
    from cable_attn.retrieval import embedded, mldr

    if name == "mldr":
        return mldr.from_hub(split)
    if name != "embedded":
        return (
            mldr.from_files(Path(name), split)
            if mldr.is_mldr(Path(name), split)
            else read_collection(Path(name), split)
        )
    with TemporaryDirectory() as folder:
        embedded.write_embedded(Path(folder) / "embedded")
        return read_collection(Path(folder) / "embedded")


def read_collection(folder: Path, split: str = "test") -> Collection:
    """All queries that have judgements, and all documents."""
    documents = dict(_texts(folder, "corpus"))
    queries = dict(_texts(folder, "queries"))
    return checked(folder.name, documents, queries, _judgements(folder / "qrels" / f"{split}.tsv"))


def checked(
    name: str, documents: dict[str, str], queries: dict[str, str], judged: dict[str, dict[str, int]]
) -> Collection:
    """A collection that can be measured, with what is odd about it."""
    if not documents:
        raise CableError(f"{name!r} has no document in its corpus.")
    notes = _oddities(documents, queries, judged)
    relevant = {
        query: found
        for query, found in judged.items()
        if queries.get(query, "").strip() and any(degree > 0 for degree in found.values())
    }
    if not relevant:
        raise CableError(f"{name!r}: none of its queries has a relevant document in the judgements.")
    return Collection(name, documents, {query: queries[query] for query in relevant}, relevant, notes)


def _oddities(documents: dict[str, str], queries: dict[str, str], judged: dict[str, dict[str, int]]) -> list[str]:
    kinds = {
        "empty documents, which cannot be found": [key for key, text in documents.items() if not text.strip()],
        "judged queries that are empty, which are left out": [q for q in judged if not queries.get(q, "-").strip()],
        "judged queries that are not among the queries, which are left out": [q for q in judged if q not in queries],
        "judged documents that are not in the corpus, which count as not found": sorted(
            {document for found in judged.values() for document in found if document not in documents}
        ),
    }
    return [f"{what}: {len(ids)} ({_some(ids)})." for what, ids in kinds.items() if ids]


def _some(ids: list[str]) -> str:
    return ", ".join(map(repr, ids[:SHOWN])) + (", …" if len(ids) > SHOWN else "")


def _texts(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """id and text of each line; the title stands before the text."""
    path = find_jsonl(folder, name)
    if path is None:
        raise CableError(f"{str(folder)!r} has no {name}.jsonl (also .gz, .bz2, .xz). BEIR's layout is wanted.")
    seen = set()
    for number, row in read_jsonl(path):
        if not isinstance(row.get("_id"), str) or not isinstance(row.get("text"), str):
            raise CableError(f"{path}, line {number}: wanted an object with the strings _id and text.")
        if row["_id"] in seen:
            raise CableError(f"{path}, line {number}: the id {row['_id']!r} was there before.")
        seen.add(row["_id"])
        yield row["_id"], titled(row)


def titled(row: dict[str, Any]) -> str:
    return f"{row.get('title') or ''} {row['text']}".strip()


def find_jsonl(folder: Path, name: str) -> Path | None:
    paths = (folder / f"{name}.jsonl{suffix}" for suffix in COMPRESSED)
    return next((path for path in paths if path.is_file()), None)


def _judgements(path: Path) -> dict[str, dict[str, int]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CableError(f"cannot read {str(path)!r}: {error}.") from error
    found: dict[str, dict[str, int]] = {}
    for number, line in enumerate(lines, 1):
        parts = line.split("\t")
        if len(parts) != 3 or not parts[2].strip().lstrip("-").isdigit():
            if number == 1:  # a header, which some files have not
                continue
            raise CableError(
                f"{path}, line {number}: wanted query, document and a whole number with tabs, got {line!r}."
            )
        found.setdefault(parts[0], {})[parts[1]] = int(parts[2])
    return found
