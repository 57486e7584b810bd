"""How well queries find their documents: nDCG@10, recall@100 and the reciprocal rank, judged by ir-measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cable_attn.errors import CableError
from cable_attn.retrieval.collection import Collection
from cable_attn.retrieval.encoder import cache_folder, encode, load_encoder

DEPTH = 100
"""How many documents are ranked for a query."""
BM25 = "bm25"

Ranking = dict[str, dict[str, float]]
"""query → document → score."""


def measure(collection: Collection, ranking: Ranking) -> dict[str, float]:
    try:
        import ir_measures
        from ir_measures import RR, R, nDCG
    except ImportError as error:
        raise CableError("retrieval metrics need ir-measures: pip install 'cable-attn[retrieval]'.") from error
    names = {nDCG @ 10: "ndcg@10", R @ 100: "recall@100", RR: "mrr"}
    found = ir_measures.calc_aggregate(list(names), collection.relevant, ranking)
    return {name: float(found[metric]) for metric, name in names.items()}


def by_vectors(collection: Collection, documents: np.ndarray, queries: np.ndarray, block: int = 1024) -> Ranking:
    """Exact search: every query with every document, by product."""
    names, asked = list(collection.documents), list(collection.queries)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.from_numpy(documents).to(device).T
    empty = ~matrix.any(0)
    ranking: Ranking = {}
    for at in range(0, len(asked), block):
        scores = torch.from_numpy(queries[at : at + block]).to(device) @ matrix
        best = scores.masked_fill(empty, -torch.inf).topk(min(DEPTH, len(names)), dim=-1)
        for query, values, places in zip(asked[at : at + block], best.values.tolist(), best.indices.tolist()):
            ranking[query] = {names[n]: value for n, value in zip(places, values) if value > -torch.inf}
    return ranking


def by_bm25(collection: Collection) -> Ranking:
    """The baseline of words alone."""
    try:
        import bm25s
    except ImportError as error:
        raise CableError("the baseline needs bm25s: pip install 'cable-attn[retrieval]'.") from error
    names, asked = list(collection.documents), list(collection.queries)
    options: dict[str, Any] = {"stopwords": "en", "show_progress": False}
    index = bm25s.BM25()
    index.index(bm25s.tokenize(list(collection.documents.values()), **options), show_progress=False)
    words = bm25s.tokenize(list(collection.queries.values()), **options)
    places, scores = index.retrieve(words, k=min(DEPTH, len(names)), show_progress=False)
    return {
        query: {names[n]: float(score) for n, score in zip(row, values) if score > 0}
        for query, row, values in zip(asked, places, scores)
    }


def evaluate(
    collection: Collection,
    encoder: str,
    lengths: Sequence[int],
    *,
    batch_tokens: int = 65536,
    cache: Path | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """A row for each maximum length; ``watch(length, n)``: n more texts are done. ``encoder`` may be ``bm25``."""
    if encoder == BM25:
        return [{"encoder": BM25, "max_length": None, **measure(collection, by_bm25(collection))}]
    model = load_encoder(encoder).to("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for length in lengths:
        tell = None if watch is None else lambda n, length=length: watch(length, n)
        folder = None if cache is None else cache_folder(cache, encoder, length)
        options: dict[str, Any] = {"batch_tokens": batch_tokens, "cache": folder}
        began = time.monotonic()
        try:
            documents = encode(model, list(collection.documents.values()), length, watch=tell, **options)
            seconds = time.monotonic() - began
            queries = encode(model, list(collection.queries.values()), length, **options)
        except CableError as error:  # learned positions beyond their table
            rows.append({"encoder": encoder, "max_length": length, "error": str(error)})
            continue
        found = measure(collection, by_vectors(collection, documents, queries))
        speed = len(documents) / max(seconds, 1e-9)
        rows.append({"encoder": encoder, "max_length": length, **found, "documents_per_second": speed})
    return rows
