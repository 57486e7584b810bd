"""The explorer page: what was looked at, packed, inside one HTML file that asks nothing of any network."""

from __future__ import annotations

import base64
import json
import zlib
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from cable_attn.explore.extract import FAR, LIGHTEST, TOP, Looked
from cable_attn.explore.tokens import KINDS

WEIGHT_UNIT = 1e-4
"""Attention weights are stored in hundredths of a percent."""
HALF_MAX = float(np.finfo(np.float16).max)


def render(looked: list[Looked], title: str) -> str:
    """One model, or several side by side."""
    page, style = _part("page.html"), _part("page.css")
    script = "\n".join(_part(f"{name}.js") for name in ("data", "drawing", "panel", "page"))
    data = {"kinds": KINDS, "top": TOP, "lightest": LIGHTEST, "far": FAR, "models": [_model(one) for one in looked]}
    parts = {"title": escape(title), "style": style, "data": script_json(data), "script": script}
    for name, content in parts.items():
        page = page.replace(f"<!-- {name} -->", content)
    return page


def _part(name: str) -> str:
    return (files("cable_attn.explore") / name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that cannot end the script element that it stands in."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _model(looked: Looked) -> dict[str, Any]:
    header, blob = pack(_compact(looked))
    return {
        "name": looked.name,
        "encoding": looked.encoding,
        "causal": looked.causal,
        "slidingWindow": looked.window,
        "trainedAt": looked.trained_at,
        "form": looked.form,
        "mixes": looked.mixes,
        "kernel": looked.kernel,
        "layers": looked.layers,
        "heads": looked.heads,
        "attentionLayers": looked.attention_layers,
        "pieces": looked.tokens.pieces,
        "kindOf": looked.tokens.kinds,
        "of": looked.tokens.of,
        "arrays": header,
        "blob": base64.b64encode(blob).decode(),
    }


def _compact(looked: Looked) -> dict[str, np.ndarray]:
    """The arrays in the fewest bytes that still show three digits."""
    arrays = looked.arrays
    compact = {
        "windows": arrays["windows"].astype(np.uint16),
        "maps": np.round(np.sqrt(arrays["maps"]) * 255).astype(np.uint8),
        "counts": arrays["counts"].astype(np.uint8),
        "keys": key_gaps(arrays["counts"], arrays["keys"]),
        "weights": np.round(arrays["weights"] / WEIGHT_UNIT).astype(np.uint16),
    }
    for name in ("steps", "gains"):
        if name in arrays:
            compact[name] = np.minimum(arrays[name], HALF_MAX).astype(np.float16)
    for name in ("table", "grid", "places", "distances", "kind_steps"):
        if name in arrays:
            compact[name] = arrays[name].astype(np.float32)
    return compact


def key_gaps(counts: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The first key of a row as its distance from the query, the others as the gap to the one before: small numbers."""
    number = counts.reshape(-1)
    query = np.tile(np.arange(counts.shape[-1]), number.size // counts.shape[-1])
    before = np.empty_like(keys)
    before[1:] = keys[:-1]
    starts = (np.cumsum(number) - number)[number > 0]
    before[starts] = query[number > 0]
    return (before - keys).astype(np.uint16)  # a key after the query wraps around, and back in the page


def pack(arrays: dict[str, np.ndarray]) -> tuple[list[dict[str, Any]], bytes]:
    """All arrays in one compressed piece: the first bytes of all numbers, then the second ones, and so on."""
    header, parts, offset = [], [], 0
    for name, array in arrays.items():
        little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
        planes = np.frombuffer(little.tobytes(), dtype=np.uint8).reshape(-1, array.dtype.itemsize).T
        kind = f"{array.dtype.kind}{array.dtype.itemsize * 8}"
        header.append({"name": name, "kind": kind, "shape": list(array.shape), "offset": offset})
        parts.append(planes.tobytes())
        offset += len(parts[-1])
    return header, zlib.compress(b"".join(parts), 9)
