"""The retrieval part of a study's cell: fine-tune the pre-trained encoder, then search with it at every length."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cable_attn.errors import CableError
from cable_attn.files import read_json
from cable_attn.retrieval import evaluation, training
from cable_attn.retrieval.collection import find_collection

FINE_TUNED = "fine_tuning.json"
RETRIEVER = "retriever"
"""The fine-tuned encoder's folder in its cell."""
EMBEDDINGS = "embeddings"
"""Only while the cell is being worked on: gigabytes for a large collection."""
Watcher = Callable[[str, float], None]
"""``watch(what, share)``."""


@dataclass(frozen=True)
class Retrieval(training.Settings):
    """What a study's encoders are fine-tuned on and how, and where they search. The seed is the cell's."""

    triplets: str = ""
    """``msmarco``, or a JSONL file."""
    collections: list[str] = field(default_factory=list)
    limit: int = 0
    """Only the first so many triplets; 0: all."""
    batch_tokens: int = 65536

    def settings(self, seed: int) -> training.Settings:
        own = {key: value for key, value in asdict(self).items() if key in training.Settings.__dataclass_fields__}
        return training.Settings(**{**own, "seed": seed})


def check(retrieval: Retrieval) -> None:
    """What must not come up after hours of pre-training."""
    if not isinstance(retrieval.collections, list) or not retrieval.collections or not retrieval.triplets:
        raise CableError("[retrieval] needs triplets (a text) and collections (a list).")
    if not retrieval.batch_tokens > 0:
        raise CableError(f"[retrieval] batch_tokens must be above 0, got {retrieval.batch_tokens}.")
    needed = ["sentence_transformers", "ir_measures"]
    needed += ["mteb"] if "mldr" in retrieval.collections else []
    needed += ["datasets"] if retrieval.triplets == "msmarco" else []
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise CableError(f"the study needs {', '.join(missing)}: pip install 'cable-attn[data,mldr,retrieval]'.")
    if retrieval.triplets != "msmarco":
        training.read_triplets(retrieval.triplets, 1)
    for name in retrieval.collections:
        if name != "mldr":
            find_collection(name)


def run(
    encoder: Path, own: Path, retrieval: Retrieval, lengths: Sequence[int], seed: int, watch: Watcher | None = None
) -> dict[str, Any]:
    """``encoder``: the pre-trained one; ``own``: the cell's folder. What is done already is not done again."""
    tell: Watcher = watch or (lambda what, share: None)
    retriever = own / RETRIEVER
    settings = retrieval.settings(seed)
    triplets = training.read_triplets(retrieval.triplets, retrieval.limit or None)
    if (retriever / "modules.json").exists():
        before = read_json(retriever / FINE_TUNED)["origin"]
        training.require_same(retriever, before, training.origin(str(encoder), triplets, settings))
    else:
        steps = settings.steps(len(triplets))

        def on_step(step: int, loss: float | None) -> None:
            tell("fine-tuning" if loss is None else f"fine-tuning, loss {loss:.2f}", step / steps)

        training.train(str(encoder), triplets, retriever, settings, (retriever / ".training").exists(), on_step)
    return {
        "fine_tuning": _fine_tuning(retriever, retrieval.batch_size),
        "retrieval": {name: _search(name, retriever, retrieval, lengths, tell) for name in retrieval.collections},
    }


def _fine_tuning(retriever: Path, batch_size: int) -> dict[str, Any]:
    known = read_json(retriever / FINE_TUNED)
    curve = [(entry["step"] * batch_size, entry["loss"]) for entry in known["log"]]
    return {"triplets": known["triplets"], "curve": curve}


def _search(name: str, retriever: Path, retrieval: Retrieval, lengths: Sequence[int], tell: Watcher) -> dict[str, Any]:
    collection = find_collection(name)
    done, total = 0, len(collection.documents) * len(lengths)

    def on_texts(length: int, count: int) -> None:
        nonlocal done
        done += count
        tell(f"{collection.name}, {length} tokens", done / total)

    options: dict[str, Any] = {"batch_tokens": retrieval.batch_tokens, "cache": retriever.parent / EMBEDDINGS}
    rows = evaluation.evaluate(collection, str(retriever), lengths, watch=on_texts, **options)
    for row in rows:
        row.pop("encoder")
    return {"sha256": collection.sha256, "notes": collection.notes, "rows": rows}


def baseline(name: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """BM25's numbers: it reads whole documents, whatever their length. ``known``: those of an earlier call."""
    collection = find_collection(name)
    if known is not None and known["sha256"] == collection.sha256:
        return known
    (row,) = evaluation.evaluate(collection, evaluation.BM25, [])
    return {"sha256": collection.sha256, **{key: row[key] for key in ("ndcg@10", "recall@100", "mrr")}}
