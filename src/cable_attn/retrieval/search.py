"""Search a folder of texts: whole documents are ranked, and of each the passage nearest to the query is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cable_attn.errors import CableError
from cable_attn.files import read_jsonl
from cable_attn.retrieval.collection import titled
from cable_attn.retrieval.encoder import cache_folder, encode, load_encoder, readable

KINDS = (".txt", ".md", ".jsonl")
PASSAGE_WORDS = 120


@dataclass(frozen=True)
class Library:
    texts: dict[str, str]
    """Where a document is (a path, or path:line of a JSONL file) → its text."""
    notes: list[str]
    """Files that cannot be searched, and why."""


@dataclass(frozen=True)
class Hit:
    where: str
    score: float
    passage: str


def read_library(folder: Path) -> Library:
    """All texts below a folder; a file that cannot be read is named and left out."""
    if not folder.is_dir():
        raise CableError(f"{str(folder)!r} is no folder.")
    texts: dict[str, str] = {}
    notes = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in KINDS and path.is_file()):
        name = str(path.relative_to(folder))
        try:
            found = _texts(path, name)
        except UnicodeDecodeError as error:
            notes.append(f"{name}: is not UTF-8 (byte {error.start}).")
            continue
        except (OSError, CableError) as error:
            notes.append(f"{name}: {error}")
            continue
        texts |= {where: text for where, text in found.items() if text.strip()}
        if not any(text.strip() for text in found.values()):
            notes.append(f"{name}: is empty.")
    if not texts:
        raise CableError(f"{str(folder)!r} has no text to search ({', '.join(KINDS)}). {' '.join(notes)}".strip())
    return Library(texts, notes)


def _texts(path: Path, name: str) -> dict[str, str]:
    if path.suffix != ".jsonl":
        return {name: path.read_text(encoding="utf-8")}
    found = {}
    for number, row in read_jsonl(path):
        if not isinstance(row.get("text"), str):
            raise CableError(f"line {number} has no string text")
        found[f"{name}:{number}"] = titled(row)
    return found


def search(
    library: Library,
    query: str,
    encoder: str,
    *,
    max_length: int = 8192,
    count: int = 5,
    cache: Path | None = None,
    watch: Callable[[int], None] | None = None,
) -> list[Hit]:
    """The nearest documents, the best first. Documents and passages that were encoded before are not encoded again."""
    if not query.strip():
        raise CableError("the query is empty.")
    model = load_encoder(encoder)
    max_length = readable(model, max_length)
    options: dict[str, Any] = {"cache": None if cache is None else cache_folder(cache, encoder, max_length)}
    names = list(library.texts)
    documents = encode(model, list(library.texts.values()), max_length, watch=watch, **options)
    asked = encode(model, [query], max_length)[0]
    scores = documents @ asked
    best = np.argsort(-scores, kind="stable")[:count]
    passages = [cut(library.texts[names[place]]) for place in best]
    near = encode(model, [one for own in passages for one in own], max_length, **options) @ asked
    ends = np.cumsum([len(own) for own in passages])[:-1]
    nearest = [own[int(part.argmax())] for own, part in zip(passages, np.split(near, ends))]
    return [Hit(names[place], float(scores[place]), passage) for place, passage in zip(best, nearest)]


def cut(text: str, words: int = PASSAGE_WORDS) -> list[str]:
    """Stretches of about so many words."""
    found = text.split()
    return [" ".join(found[at : at + words]) for at in range(0, len(found), words)]
