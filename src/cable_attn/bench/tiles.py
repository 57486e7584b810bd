"""``cable bench tiles``: the fastest tiles of the fused kernels on this GPU, for GPUs that the tables do not know.

Every candidate is compiled first, in as many processes as there are cores, then timed as in ``cable bench attention``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from cable_attn.attention import fused, tiles
from cable_attn.attention.tiles import Tile, Tiles
from cable_attn.bench.attention import Inputs, Shape, own_stream

BIASES = {"cable": 0, "k-cable": fused.KERNELS["log"]}
SIZES = {"forward": ((64, 64), (128, 64), (128, 128)), "keys": ((64, 64), (32, 64), (64, 128)), "queries": ((64, 64), (64, 32), (128, 64))}  # fmt: skip


def candidates(kernel: str) -> list[Tile]:
    """Tiles worth trying, as (queries, keys, warps, stages, late)."""
    found = []
    for queries, keys in SIZES[kernel]:
        for warps in (4, 8) if max(queries, keys) > 64 else (4,):
            for stages in (1, 2, 3) if kernel == "keys" else (2, 3):
                found += [Tile(queries, keys, warps, stages, late) for late in (True, False)]
    return found


class Problem:
    """A shape's tensors and the three kernels as calls that take a tile."""

    def __init__(self, shape: Shape, bias: str):
        self.shape, self.inputs = shape, Inputs.random(shape)
        self.numbers = (shape.dim**-0.5, True, 0, 0, BIASES[bias], 0.0)
        self.base = self._tiles()
        q, k, v, c, g = (leaf.detach() for leaf in self.inputs.leaves)
        self.arguments = (q, k, v, c, g, None, None)
        self.outputs = fused._forward(*self.arguments, *self.numbers)
        self.upstream = torch.randn_like(q)

    def _tiles(self) -> Tiles:
        q = self.inputs.q
        capability = torch.cuda.get_device_capability()
        return tiles.tiles_for(self.shape.dim, q.dtype, capability, self.numbers[4])

    def call(self, kernel: str, tile: Tile) -> None:
        """The forward pass, or the backward pass with this tile for one of its kernels."""
        key = (self.shape.dim, self.inputs.q.dtype)
        tiles.OVERRIDES[key] = self.base._replace(**{kernel: tile})
        try:
            if kernel == "forward":
                fused._forward(*self.arguments, *self.numbers)
            else:
                q, k, v, _, g, *masks = self.arguments
                fused._backward(self.upstream, q, k, v, g, *masks, *self.outputs, *self.numbers, True)
        finally:
            del tiles.OVERRIDES[key]


def _compile(shape: Shape, bias: str, jobs: list[tuple[str, Tile]]) -> list[str]:
    """Fill the cache on disk; what does not compile or fit is named."""
    problem = Problem(shape._replace(batch=1, heads=2), bias)
    wrong = []
    for kernel, tile in jobs:
        try:
            problem.call(kernel, tile)
            torch.cuda.synchronize()
        except Exception as error:
            wrong.append(f"{kernel} {tuple(tile)}: {str(error).strip().splitlines()[0][:120]}")
    return wrong


def run(shapes: tuple[Shape, ...], biases: tuple[str, ...], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each shape, bias, kernel and tile: milliseconds of the forward or of the backward pass."""
    from triton.testing import do_bench_cudagraph

    jobs = [(kernel, tile) for kernel in SIZES for tile in candidates(kernel)]
    workers = max(os.cpu_count() or 1, 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        kinds = {(shape.dim, bias): shape for shape in shapes for bias in biases}
        waiting = [
            pool.submit(_compile, shape, bias, jobs[n::workers])
            for (_, bias), shape in kinds.items()
            for n in range(workers)
        ]
        for done in waiting:
            for line in done.result():
                tell(line)
    for shape in shapes:
        for bias in biases:
            problem = Problem(shape, bias)
            for kernel, tile in jobs:
                if bias == "cable" and not tile.late:
                    continue
                row = {"bench": "tiles", "shape": shape._asdict(), "bias": bias, "kernel": kernel, "tile": list(tile)}
                try:
                    with own_stream():
                        call = lambda: problem.call(kernel, tile)  # noqa: B023, E731
                        yield row | {"ms": do_bench_cudagraph(call, rep=20, return_mode="median")}
                except Exception:
                    continue
