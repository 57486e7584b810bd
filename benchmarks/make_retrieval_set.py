"""The data of benchmarks/retrieval.toml: triplets to fine-tune on, and two collections in BEIR's layout to search.

    python benchmarks/make_retrieval_set.py ARTICLES DISTRACTORS PAIRS OUT

ARTICLES: SQuAD v1.1's development articles with their paragraphs (corpus, queries, passages and their judgements).
DISTRACTORS: the same articles among a few thousand others. PAIRS: PubMedQA and PolicyQA.

Every second article, in the order of their names, is for training: its questions with their paragraphs, and as hard
negative the next paragraph of the same article. Only questions about the other articles are asked in the test. From
PubMedQA come questions with their abstracts, from PolicyQA questions with their segments (negative: the next segment of
the same policy); a question that comes again is left out.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Triplet = dict[str, str]


def read(path: Path) -> Iterator[dict[str, Any]]:
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def judgements(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def squad(articles: Path, train: set[str]) -> Iterator[Triplet]:
    passages = {row["_id"]: row["text"] for row in read(articles / "passages.jsonl")}
    queries = {row["_id"]: row["text"] for row in read(articles / "queries.jsonl")}
    for query, passage, _ in judgements(articles / "passage_qrels.tsv"):
        article, number = passage.rsplit("#", 1)
        if article in train:
            other = passages.get(f"{article}#{int(number) + 1}", passages[f"{article}#0"])
            yield {"query": queries[query], "positive": passages[passage], "negative": other}


def pubmed(pairs: Path) -> Iterator[Triplet]:
    rows = list(json.loads((pairs / "pubmedqa_ori_pqal.json").read_text(encoding="utf-8")).values())
    for row, other in zip(rows, [*rows[1:], rows[0]]):
        yield {"query": row["QUESTION"], "positive": " ".join(row["CONTEXTS"]), "negative": " ".join(other["CONTEXTS"])}


def policies(pairs: Path) -> Iterator[Triplet]:
    for name in ("policyqa_dev.json", "policyqa_test.json"):
        for policy in json.loads((pairs / name).read_text(encoding="utf-8"))["data"]:
            segments = policy["paragraphs"]
            for segment, other in zip(segments, [*segments[1:], segments[0]]):
                for question in segment["qas"]:
                    title = f"{policy['title']}: {question['question']}"
                    yield {"query": title, "positive": segment["context"], "negative": other["context"]}


def once(triplets: Iterable[Triplet]) -> Iterator[Triplet]:
    seen: set[str] = set()
    for triplet in triplets:
        if triplet["query"] not in seen and triplet["positive"] != triplet["negative"]:
            seen.add(triplet["query"])
            yield triplet


def collection(source: Path, out: Path, test: set[str]) -> int:
    """The whole corpus; only the judgements of the test articles."""
    (out / "qrels").mkdir(parents=True)
    for path in source.iterdir():
        if path.name.startswith(("corpus.jsonl", "queries.jsonl")):
            shutil.copyfile(path, out / path.name)
    kept = [row for row in judgements(source / "qrels" / "test.tsv") if row[1] in test]
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(row) for row in kept)]
    (out / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(kept)


def main(articles: Path, distractors: Path, pairs: Path, out: Path) -> None:
    names = sorted(row["_id"] for row in read(articles / "corpus.jsonl"))
    train, test = set(names[::2]), set(names[1::2])
    out.mkdir(parents=True)
    found = list(once([*squad(articles, train), *pubmed(pairs), *policies(pairs)]))
    with lzma.open(out / "triplets.jsonl.xz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(triplet) + "\n" for triplet in found)
    print(f"{len(train)} articles to train on, {len(test)} to ask about; {len(found)} triplets")
    for name, source in (("articles", articles), ("wiki", distractors)):
        print(f"{name}: {collection(source, out / name, test)} questions")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
