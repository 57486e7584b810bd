"""Tile sizes of the fused kernels, tuned ahead of time so that a first call only compiles one version of each.

A tile is (queries, keys, warps, stages, late). It depends on the GPU generation and on the head dimension, rounded up
to a power of two; fp32 has its own, since its tiles are twice as large and its dots do not use the tensor cores.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from cable_attn.attention.operands import LOG, TOEPLITZ
from cable_attn.errors import CableError


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int
    late: bool = True
    """Forward: apply the scale in the exponent. Backward: sum the gradients of c and g over a row once, at the end.
    Both save instructions and cost registers."""


class Tiles(NamedTuple):
    forward: Tile
    keys: Tile
    queries: Tile


_SMALL_HOPPER = Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2, False), Tile(64, 64, 4, 3))
_SMALL_AMPERE = Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 1), Tile(64, 64, 4, 2))

HALF: dict[str, dict[int, Tiles]] = {
    "sm_80": {
        16: _SMALL_AMPERE,
        32: _SMALL_AMPERE,
        64: _SMALL_AMPERE,
        128: Tiles(Tile(64, 64, 4, 2, False), Tile(64, 64, 4, 1, False), Tile(64, 64, 4, 1, False)),
        256: Tiles(Tile(64, 32, 4, 2, False), Tile(32, 32, 4, 1, False), Tile(32, 32, 4, 1, False)),
    },
    "sm_90": {
        16: _SMALL_HOPPER,
        32: _SMALL_HOPPER,
        64: _SMALL_HOPPER,
        128: Tiles(Tile(128, 128, 8, 3, False), Tile(64, 128, 8, 2, False), Tile(128, 64, 8, 3)),
        256: Tiles(Tile(64, 64, 4, 2, False), Tile(32, 64, 4, 1, False), Tile(64, 32, 4, 2, False)),
    },
}
HALF["sm_100"] = HALF["sm_90"]

USES_COLUMNS = ("sm_90",)
"""Where the tensor cores do the bias's work backward in bfloat16; elsewhere it has not been measured."""

LOG_KERNEL: dict[tuple[str, int], Tiles] = {
    ("sm_90", 64): Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3)),
    ("sm_90", 128): Tiles(Tile(64, 64, 4, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 3)),
}
"""Better tiles for K-CABLE, which does more with each score."""

TABLES: dict[tuple[str, int], Tiles] = {("sm_90", 128): LOG_KERNEL["sm_90", 128]}
TABLES["sm_100", 128] = TABLES["sm_90", 128]
"""For a table of biases, of which each tile needs its part in shared memory."""

SINGLE: dict[int, Tiles] = {
    dim: Tiles(Tile(32, 32, 4, 1, False), Tile(32, 32, 4, 1, False), Tile(32, 32, 4, 1, False))
    for dim in (16, 32, 64, 128)
}
SINGLE[256] = Tiles(Tile(16, 32, 4, 1, False), Tile(16, 32, 4, 1, False), Tile(16, 32, 4, 1, False))

INTERPRETED = Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1, False))
"""Small and uneven, so that the interpreter walks every path of the kernels on short texts."""


@cache
def overrides() -> dict[tuple[int, torch.dtype, int], Tiles]:
    """Tiles by (padded head dimension, dtype, kernel) that win over the tables: those of ``cable bench tiles``, in the
    file that CABLE_TILES names."""
    path = os.environ.get("CABLE_TILES")
    found: dict[tuple[int, torch.dtype, int], Tiles] = {}
    try:
        for entry in json.loads(Path(path).read_text(encoding="utf-8")) if path else []:
            parts = (Tile(*entry[name]) for name in ("forward_tile", "keys_tile", "queries_tile"))
            found[entry["dim"], getattr(torch, entry["dtype"]), entry["kernel"]] = Tiles(*parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CableError(f"CABLE_TILES={path!r} is not a tiles file of cable bench tiles: {error}") from error
    return found


def generation(capability: tuple[int, int]) -> str:
    """The table for a GPU: that of its own generation, or the last one before it."""
    if capability >= (10, 0):
        return "sm_100"
    return "sm_90" if capability >= (9, 0) else "sm_80"


def tiles_for(dim: int, dtype: torch.dtype, kernel: int, capability: tuple[int, int]) -> Tiles:
    """dim: the head dimension, rounded up to a power of two; kernel: that of the bias."""
    if (dim, dtype, kernel) in overrides():
        return overrides()[dim, dtype, kernel]
    if dtype == torch.float32:
        return SINGLE[dim]
    name = generation(capability)
    if kernel == LOG and (name, dim) in LOG_KERNEL:
        return LOG_KERNEL[name, dim]
    if kernel >= TOEPLITZ and (name, dim) in TABLES:
        return TABLES[name, dim]
    return HALF[name][dim]
