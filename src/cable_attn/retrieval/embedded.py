"""A small retrieval set made of the embedded novels, so that everything can be tried in a minute on a CPU.

Documents are the chapters of the validation and test novels. From each chapter every 60th sentence of 8 to 30 words is
taken *out*, and is a query for it: the chapter must be found from a sentence that it no longer holds. Triplets to train
on come from the training novels: a sentence, the eight sentences around the place it was taken from, and as a hard
negative the first eight of the next chapter.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from cable_attn.data.corpus import embedded_corpus
from cable_attn.files import write_atomically

HEADING = re.compile(r"^\s*(?:CHAPTER|Chapter) [IVXLC\d]+\.?\s*$", re.MULTILINE)
SENTENCE = re.compile(r"(?<=[.!?][\"”'’ ])\s*(?=[A-Z\"“])|(?<=[.!?])\s+(?=[A-Z\"“])")
EVERY, NEARBY = 60, 4
SHORTEST, LONGEST = 8, 30


def write_embedded(folder: Path) -> None:
    """BEIR's layout, and ``triplets.jsonl`` for training."""
    documents, queries, judged = [], [], ["query-id\tcorpus-id\tscore"]
    for split in ("validation", "test"):
        for name, number, sentences in _chapters(split):
            key = f"{name}-{number}"
            taken = _taken(sentences, EVERY)
            text = " ".join(sentence for n, sentence in enumerate(sentences) if n not in taken)
            documents.append({"_id": key, "title": "", "text": text})
            for n in taken:
                queries.append({"_id": f"{key}-{n}", "text": sentences[n]})
                judged.append(f"{key}-{n}\t{key}\t1")
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    _write(folder / "corpus.jsonl", documents)
    _write(folder / "queries.jsonl", queries)
    write_atomically(folder / "qrels" / "test.tsv", "\n".join(judged) + "\n")
    _write(folder / "triplets.jsonl", _triplets(EVERY // 4))


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _chapters(split: str) -> list[tuple[str, int, list[str]]]:
    found = []
    for document in embedded_corpus(split):
        for number, text in enumerate(HEADING.split(document.text)[1:], 1):
            sentences = [part for part in SENTENCE.split(" ".join(text.split())) if part.strip()]
            found.append((document.name, number, sentences))
    return found


def _taken(sentences: list[str], every: int) -> list[int]:
    fitting = [n for n, sentence in enumerate(sentences) if SHORTEST <= len(sentence.split()) <= LONGEST]
    return fitting[every // 2 :: every]


def _triplets(every: int) -> list[dict[str, str]]:
    chapters = _chapters("train")
    rows = []
    for at, (_, _, sentences) in enumerate(chapters):
        other = chapters[(at + 1) % len(chapters)][2]
        for n in _taken(sentences, every):
            around = sentences[max(n - NEARBY, 0) : n] + sentences[n + 1 : n + 1 + NEARBY]
            negative = other[: 2 * NEARBY]
            rows.append({"query": sentences[n], "positive": " ".join(around), "negative": " ".join(negative)})
    return rows
