"""``cable bench tiles``: the fastest tiles of the fused kernels on this GPU, for GPUs that the tables do not know.

Every candidate is compiled first, in as many processes as there are cores, then timed as in ``cable bench attention``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from cable_attn.attention import fused, tiles
from cable_attn.attention.operands import LINEAR, LOG
from cable_attn.attention.tiles import Tile, Tiles
from cable_attn.bench.attention import Inputs, Shape, own_stream
from cable_attn.devices import require_gpu

BIASES = {"cable": LINEAR, "k-cable": LOG}
SIZES = {
    "forward": ((64, 64), (128, 64), (128, 128)),
    "keys": ((64, 64), (32, 64), (64, 128)),
    "queries": ((64, 64), (64, 32), (128, 64)),
}


def candidates(kernel: str) -> list[Tile]:
    """Tiles worth trying, as (queries, keys, warps, stages, late)."""
    found = []
    for queries, keys in SIZES[kernel]:
        for warps in (4, 8) if max(queries, keys) > 64 else (4,):
            for stages in (1, 2, 3) if kernel == "keys" else (2, 3):
                found += [Tile(queries, keys, warps, stages, late) for late in (True, False)]
    return found


class Problem:
    """A shape's tensors, and the passes as calls that take a tile for one of their kernels."""

    def __init__(self, shape: Shape, bias: str):
        q, k, v, c, g = (leaf.detach() for leaf in Inputs.random(shape).leaves)
        numbers: Any = (shape.dim**-0.5, True, 0, 0, BIASES[bias], 0.0, 0)
        self.key = (fused.padded(shape.dim), torch.bfloat16, BIASES[bias])
        self.tiles: Tiles = tiles.tiles_for(*self.key, torch.cuda.get_device_capability())
        self.forward: Any = partial(fused._forward, q, k, v, c, g, None, None, *numbers)
        rest: Any = (*self.forward(), *numbers, True)
        self.backward: Any = partial(fused._backward, torch.randn_like(q), q, k, v, g, None, None, *rest)

    def call(self, kernel: str, tile: Tile) -> None:
        chosen = tiles.overrides()
        before = chosen.get(self.key)
        chosen[self.key] = self.tiles._replace(**{kernel: tile})
        try:
            self.forward() if kernel == "forward" else self.backward()
        finally:
            del chosen[self.key]
            if before is not None:
                chosen[self.key] = before

    def milliseconds(self, kernel: str, tile: Tile) -> float:
        from triton.testing import do_bench_cudagraph

        with own_stream():
            return float(do_bench_cudagraph(lambda: self.call(kernel, tile), rep=20, return_mode="median"))


def _compile(shape: Shape, bias: str, jobs: list[tuple[str, Tile]]) -> list[tuple[str, Tile]]:
    """Fill the cache on disk; gives back what compiles and fits."""
    problem = Problem(shape._replace(batch=1, heads=2), bias)
    good = []
    for kernel, tile in jobs:
        try:
            problem.call(kernel, tile)
            torch.cuda.synchronize()
            good.append((kernel, tile))
        except Exception:  # too much shared memory, or a tile that Triton cannot lay out
            continue
    return good


def run(shape: Shape, bias: str, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each kernel and tile: milliseconds of the forward or of the backward pass."""
    require_gpu("cable bench tiles")
    jobs = [(kernel, tile) for kernel in SIZES for tile in candidates(kernel)]
    workers = os.cpu_count() or 1
    tell(f"compiling {len(jobs)} candidates in {workers} processes")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(_compile, shape, bias, jobs[n::workers]) for n in range(workers)]
        good = [job for part in parts for job in part.result()]
    problem = Problem(shape, bias)
    for kernel, tile in sorted(good):
        row = {"bench": "tiles", "shape": shape._asdict(), "bias": bias, "kernel": kernel, "tile": list(tile)}
        yield row | {"ms": problem.milliseconds(kernel, tile)}


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The entry for a tiles file: what ``CABLE_TILES`` names."""
    first = rows[0]
    entry = {"dim": fused.padded(first["shape"]["dim"]), "dtype": "bfloat16", "kernel": BIASES[first["bias"]]}
    for kernel in SIZES:
        entry[kernel + "_tile"] = min((row for row in rows if row["kernel"] == kernel), key=lambda row: row["ms"])[
            "tile"
        ]
    return entry
