"""What the cells of a study have found, by variant and length, and what the paper says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from cable_attn.errors import unknown


def with_again(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was read once more stands as a variant of its own, below the one that was trained."""
    told = []
    for row in rows:
        told += [row, *({**row, "variant": name, **found} for name, found in row.get("again", {}).items())]
    return told


def by_variant(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """variant → length → the perplexities of all seeds; what a variant cannot read is absent."""
    table: dict[str, dict[int, list[float]]] = {}
    for row in with_again(rows):
        lengths = table.setdefault(row["variant"], {})
        for result in row["results"]:
            if "perplexity" in result:
                lengths.setdefault(result["length"], []).append(result["perplexity"])
    return {variant: lengths for variant, lengths in table.items() if lengths}


def reading(row: dict[str, Any]) -> tuple[float, int]:
    """Of all lengths together: seconds and tokens."""
    seconds = sum(result.get("seconds", 0) for result in row["results"])
    return seconds, sum(result.get("tokens", 0) for result in row["results"])


def reading_speeds(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """variant → length → thousands of tokens read in a second, for all seeds."""
    table: dict[str, dict[int, list[float]]] = {}
    for row in with_again(rows):
        for result in row["results"]:
            if result.get("seconds"):
                speed = result["tokens"] / result["seconds"] / 1000
                table.setdefault(row["variant"], {}).setdefault(result["length"], []).append(speed)
    return table


def found_documents(rows: Sequence[dict[str, Any]], collection: str) -> dict[str, dict[int, list[float]]]:
    """variant → length → 100 × nDCG@10 of all seeds; lengths that a variant cannot read are absent."""
    table: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        lengths = table.setdefault(row["variant"], {})
        for result in row["retrieval"].get(collection, {"rows": []})["rows"]:
            if "ndcg@10" in result:
                lengths.setdefault(result["max_length"], []).append(100 * result["ndcg@10"])
    return table


def found_by_length(rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """variant → length → the share of pass keys found at all depths, for all seeds."""
    table: dict[str, dict[int, list[float]]] = {}
    for row in with_again(rows):
        for length in sorted({result["length"] for result in row.get("passkey", []) if "error" not in result}):
            found = [one["accuracy"] for one in row["passkey"] if one["length"] == length and "error" not in one]
            table.setdefault(row["variant"], {}).setdefault(length, []).append(100 * sum(found) / len(found))
    return table


def found_by_distance(rows: Sequence[dict[str, Any]], trained_at: int) -> dict[str, dict[int, list[float]]]:
    """variant → tokens → the share of pass keys found that stood about so far back, or down to half of it, in texts of
    all lengths, for all seeds; the first column begins at the question. Of what reads all lengths that any reads."""
    table: dict[str, dict[int, list[float]]] = {}
    for row in _read_throughout(rows):
        for tokens, results in _by_distance(row, trained_at).items():
            share = 100 * sum(one["accuracy"] for one in results) / len(results)
            table.setdefault(row["variant"], {}).setdefault(tokens, []).append(share)
    return table


def texts_by_distance(rows: Sequence[dict[str, Any]], trained_at: int) -> dict[int, int]:
    """tokens → in how many texts ``found_by_distance`` looked, with each seed."""
    asked = [_by_distance(row, trained_at) for row in _read_throughout(rows)]
    return {tokens: sum(one["samples"] for one in results) for own in asked for tokens, results in own.items()}


def _read_throughout(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the pass key texts that were read, of all lengths."""
    told = [
        {**row, "passkey": [one for one in row.get("passkey", []) if "error" not in one]} for row in with_again(rows)
    ]
    lengths = [{one["length"] for one in row["passkey"]} for row in told]
    return [row for row, own in zip(told, lengths) if own == set().union(*lengths)]


def _by_distance(row: dict[str, Any], trained_at: int) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for result in row["passkey"]:
        back = (1 - result["depth"]) * result["length"]
        doublings = math.ceil(math.log2(max(back / trained_at, 1)))
        found.setdefault(trained_at << doublings, []).append(result)
    return dict(sorted(found.items()))


def paper(entry: str) -> dict[str, Any] | None:
    """The paper's numbers for a study."""
    if not entry:
        return None
    known = _paper()
    if entry not in known:
        raise unknown("entry of paper.json", entry, list(known))
    found: dict[str, Any] = known[entry]
    return found


def paper_numbers() -> dict[str, dict[str, dict[str, float]]]:
    """entry → encoding → column → what the paper prints."""
    return {
        name: {
            encoding: {column: value for column, value in row.items() if value is not None}
            for encoding, row in entry["rows"].items()
        }
        for name, entry in _paper().items()
        if isinstance(entry, dict) and entry.get("rows")
    }


def claims() -> list[dict[str, str]]:
    """The paper's, in our words, and where it makes them."""
    found: list[dict[str, str]] = _paper()["claims"]
    return found


def _paper() -> dict[str, Any]:
    return dict(json.loads((files("cable_attn") / "studies" / "paper.json").read_text(encoding="utf-8")))
