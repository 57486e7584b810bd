"""How well queries find their documents: nDCG@10, recall@100 and the reciprocal rank, judged by ir-measures."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cable_attn.devices import best_device
from cable_attn.errors import CableError, require_known
from cable_attn.retrieval.collection import Collection
from cable_attn.retrieval.encoder import cache_folder, encode, load_encoder, require_encoder

DEPTH = 100
"""How many documents are ranked for a query."""
QUERIES = 1024
"""How many are compared with all documents at once."""
BM25 = "bm25"
SEARCHES = ("auto", "product", "faiss")

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


def by_vectors(collection: Collection, documents: np.ndarray, queries: np.ndarray, search: str = "auto") -> Ranking:
    """Exact search by product; ``faiss`` does it where there is no GPU, if it is installed."""
    names, asked = list(collection.documents), list(collection.queries)
    if not (np.isfinite(documents).all() and np.isfinite(queries).all()):
        raise CableError("the encoder gives vectors that are not finite. Its weights are broken.")
    filled = np.flatnonzero(documents.any(1))  # an empty document has no vector and cannot be found
    if not len(filled):
        return {query: {} for query in asked}
    best = _by_faiss if _uses_faiss(search) else _by_product
    places, scores = best(documents[filled], queries, min(DEPTH, len(filled)))
    return {
        query: {names[filled[n]]: float(score) for n, score in zip(row, values)}
        for query, row, values in zip(asked, places.tolist(), scores.tolist())
    }


def _uses_faiss(search: str) -> bool:
    require_known("search", search, SEARCHES)
    installed = importlib.util.find_spec("faiss") is not None
    if search == "faiss" and not installed:
        raise CableError("search 'faiss' needs the package: pip install faiss-cpu. The others are auto and product.")
    return search == "faiss" or (search == "auto" and installed and not torch.cuda.is_available())


def _by_product(documents: np.ndarray, queries: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    device = best_device()
    matrix = torch.from_numpy(documents).to(device).T
    parts = [(part.to(device) @ matrix).topk(depth, dim=-1) for part in torch.from_numpy(queries).split(QUERIES)]
    places, scores = (torch.cat([getattr(part, name) for part in parts]) for name in ("indices", "values"))
    return places.cpu().numpy(), scores.cpu().numpy()


def _by_faiss(documents: np.ndarray, queries: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    import faiss

    index = faiss.IndexFlatIP(documents.shape[1])
    index.add(documents)
    scores, places = index.search(queries, depth)
    return places, scores


def by_bm25(collection: Collection) -> Ranking:
    """The baseline of words alone."""
    try:
        import bm25s
    except ImportError as error:
        raise CableError("the baseline needs bm25s: pip install 'cable-attn[retrieval]'.") from error
    names, asked = list(collection.documents), list(collection.queries)
    options: dict[str, Any] = {"stopwords": "en", "show_progress": False}
    index = bm25s.BM25()
    words = bm25s.tokenize(list(collection.documents.values()), **options)
    if not words.vocab:
        return {query: {} for query in asked}
    index.index(words, show_progress=False)
    words = bm25s.tokenize(list(collection.queries.values()), **options)
    places, scores = index.retrieve(words, k=min(DEPTH, len(names)), show_progress=False)
    return {
        query: {names[n]: float(score) for n, score in zip(row, values) if score > 0}
        for query, row, values in zip(asked, places, scores)
    }


def check(encoders: Sequence[str], search: str) -> None:
    """What would only come up after hours of encoding."""
    _uses_faiss(search)
    for package in ("ir_measures", *(["bm25s"] if BM25 in encoders else [])):
        if importlib.util.find_spec(package) is None:
            raise CableError(f"retrieval needs the package {package}: pip install 'cable-attn[retrieval]'.")
    for encoder in encoders:
        if encoder != BM25:
            require_encoder(encoder)


def evaluate(
    collection: Collection,
    encoder: str,
    lengths: Sequence[int],
    *,
    batch_tokens: int = 65536,
    cache: Path | None = None,
    search: str = "auto",
    watch: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """A row for each maximum length; ``watch(length, n)``: n more texts are done. ``encoder`` may be ``bm25``."""
    if encoder == BM25:
        return [{"encoder": BM25, "max_length": None, **measure(collection, by_bm25(collection))}]
    model = load_encoder(encoder).to(best_device())
    rows = []
    for length in lengths:
        done: list[int] = []

        def tell(n: int, length: int = length, done: list[int] = done) -> None:
            done.append(n)
            if watch is not None:
                watch(length, n)

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
        found = measure(collection, by_vectors(collection, documents, queries, search))
        rows.append({"encoder": encoder, "max_length": length, **found})
        if encoded := sum(done[1:]):  # the first are those that the cache had
            rows[-1]["documents_per_second"] = encoded / max(seconds, 1e-9)
    return rows
