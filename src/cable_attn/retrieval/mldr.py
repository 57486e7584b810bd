"""MLDR, English: long documents and questions about them, from the hub through mteb or from its own files.

    FOLDER/corpus.jsonl      {"docid": …, "text": …}
    FOLDER/test.jsonl        {"query_id": …, "query": …, "positive_passages": [{"docid": …}, …]}

The files may be compressed (.gz, .bz2, .xz), as they are on the hub (mldr-v1.0-en).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cable_attn.errors import CableError, reason
from cable_attn.files import read_jsonl
from cable_attn.retrieval.collection import Collection, checked, find_jsonl, titled

TASK = "MultiLongDocRetrieval"


def from_hub(split: str = "test") -> Collection:
    try:
        import mteb
    except ImportError as error:
        raise CableError(
            "mldr comes through the package mteb: pip install 'cable-attn[mldr]'. Or give the folder of its files "
            "(corpus.jsonl.gz and test.jsonl.gz of mldr-v1.0-en)."
        ) from error
    task: Any = mteb.get_task(TASK, languages=["eng"], eval_splits=[split])
    try:
        task.load_data()
    except Exception as error:  # whatever the hub or the network did
        raise CableError(
            f"the hub cannot give {task.metadata.dataset['path']!r}: {reason(error)}. Fetch it where there is a "
            "network, or give the folder of MLDR's files (corpus.jsonl.gz and test.jsonl.gz)."
        ) from error
    found = task.dataset["en"][split]
    documents = {row["id"]: titled(row) for row in found["corpus"]}
    queries = {row["id"]: row["text"] for row in found["queries"]}
    return checked("mldr", documents, queries, found["relevant_docs"])


def is_mldr(folder: Path, split: str) -> bool:
    """MLDR's own layout, not BEIR's."""
    return find_jsonl(folder, "queries") is None and find_jsonl(folder, split) is not None


def from_files(folder: Path, split: str = "test") -> Collection:
    paths = {name: find_jsonl(folder, name) for name in ("corpus", split)}
    for name, path in paths.items():
        if path is None:
            raise CableError(f"{str(folder)!r} has MLDR's layout but no {name}.jsonl (also .gz, .bz2, .xz).")
    documents: dict[str, str] = {}
    for number, row in read_jsonl(paths["corpus"]):  # type: ignore[arg-type]
        document = _new(paths["corpus"], number, _text(paths["corpus"], number, row, "docid"), documents)
        documents[document] = _text(paths["corpus"], number, row, "text")
    queries: dict[str, str] = {}
    relevant: dict[str, dict[str, int]] = {}
    for number, row in read_jsonl(paths[split]):  # type: ignore[arg-type]
        query = _new(paths[split], number, _text(paths[split], number, row, "query_id"), queries)
        queries[query] = _text(paths[split], number, row, "query")
        passages = row.get("positive_passages") or []
        relevant[query] = {_text(paths[split], number, passage, "docid"): 1 for passage in passages}
    return checked(folder.name, documents, queries, relevant)


def _new(path: Path | None, number: int, name: str, known: dict[str, str]) -> str:
    if name in known:
        raise CableError(f"{path}, line {number}: the id {name!r} was there before.")
    return name


def _text(path: Path | None, number: int, row: Any, key: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(key), str):
        raise CableError(f"{path}, line {number}: wanted an object with the text {key}.")
    return str(row[key])
