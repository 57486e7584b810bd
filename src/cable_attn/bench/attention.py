"""``cable bench attention``: the fused kernels beside what people run today.

Times are GPU times: each peer is captured in a CUDA graph and replayed, so that nobody's Python counts; the median over
many replays, on inputs larger than the L2 cache. No figure is printed before the kernels have passed the gate.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cable_attn.attention import attention
from cable_attn.bias import PotentialBias
from cable_attn.devices import require_gpu
from cable_attn.errors import CableError, reason


class Shape(NamedTuple):
    batch: int
    heads: int
    tokens: int
    dim: int


SHAPES = (Shape(16, 16, 1024, 64), Shape(4, 32, 4096, 64), Shape(2, 32, 16384, 64), Shape(4, 16, 4096, 128))
LARGEST_SQUARE = 2**33
"""Bytes of a materialised bias above which peers that need one are left out."""


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    c: Tensor
    g: Tensor

    @classmethod
    def random(cls, shape: Shape, seed: int = 0) -> Inputs:
        """Potential and gain of the size that CABLE's init gives."""
        generator = torch.Generator("cuda").manual_seed(seed)
        batch, heads, tokens, dim = shape
        options: dict[str, Any] = {"device": "cuda", "generator": generator}
        q, k, v = torch.randn(3, batch, heads, tokens, dim, dtype=torch.bfloat16, **options)
        steps = torch.randn(batch, heads, tokens, **options).relu() * 0.45
        gain = F.softplus(torch.randn(batch, heads, tokens, **options) * 0.45)
        return cls(*(t.clone().requires_grad_() for t in (q, k, v, steps.double().cumsum(-1), gain)))

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.c, self.g]


Peer = Callable[[Inputs], Tensor]


def _cable(x: Inputs) -> Tensor:
    return attention(x.q, x.k, x.v, PotentialBias(x.c, x.g), backend="triton")


def _k_cable(x: Inputs) -> Tensor:
    return attention(x.q, x.k, x.v, PotentialBias(x.c, x.g, "log"), backend="triton")


def sdpa(name: str) -> Peer:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, name)

    def run(x: Inputs) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True)

    return run


def _materialised(x: Inputs) -> Tensor:
    """What a first implementation does: the bias as a T×T mask."""
    tokens = x.q.shape[2]
    bias = x.g.unsqueeze(-1) * (x.c.float().unsqueeze(-2) - x.c.float().unsqueeze(-1))
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.q.device).triu(1)
    mask = bias.masked_fill(hidden, float("-inf")).to(x.q.dtype)
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=mask)


def _columns(x: Inputs) -> Tensor:
    return attention(x.q, x.k, x.v, PotentialBias(x.c, x.g), backend="sdpa")


def _flex() -> Peer:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, Any] = {}

    def run(x: Inputs) -> Tensor:
        tokens = x.q.shape[2]
        if tokens not in masks:
            masks[tokens] = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device="cuda")
        c, g = x.c.float(), x.g
        rows, columns = c.clone(), c.clone()  # one gather per captured tensor that needs a gradient

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s - g[b, h, i] * (rows[b, h, i] - columns[b, h, j])

        return compiled(x.q, x.k, x.v, score_mod=score, block_mask=masks[tokens])

    return run


def _fla_fox() -> Peer:
    module = importlib.import_module("fla.ops.forgetting_attn")

    def run(x: Inputs) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        return module.parallel_forgetting_attn(q, k, v, -x.g.transpose(1, 2))

    return run


def peers(shape: Shape) -> dict[str, Peer]:
    """Those that this machine has and this shape allows."""
    found: dict[str, Peer] = {
        "cable": _cable,
        "k-cable": _k_cable,
        "sdpa flash": sdpa("FLASH_ATTENTION"),
        "sdpa cudnn": sdpa("CUDNN_ATTENTION"),
    }
    if shape.batch * shape.heads * shape.tokens**2 * 4 <= LARGEST_SQUARE:
        found["materialised"] = _materialised
        found["columns"] = _columns
    if shape.tokens <= 4096:
        found["flex"] = _flex()
    if importlib.util.find_spec("fla") is not None:
        found["fla fox"] = _fla_fox()
    return found


def gate(dim: int) -> float:
    """Error of the fused bf16 output over that of plain bf16 arithmetic, both against fp64; above 2 is an error."""
    x = Inputs.random(Shape(1, 4, 500, dim), seed=1)
    bias = PotentialBias(x.c.detach(), x.g.detach())
    exact = attention(x.q.double(), x.k.double(), x.v.double(), bias, backend="reference")
    plain = _materialised(x)
    ours = _cable(x)
    with torch.no_grad():
        ratio = float((ours.double() - exact).abs().max() / (plain.double() - exact).abs().max())
    if not ratio <= 2:
        raise CableError(
            f"the fused kernels fail the correctness gate at head dimension {dim}: error ratio {ratio:.2f}."
        )
    return ratio


def measure(shape: Shape, peer: Peer, milliseconds: int = 60) -> dict[str, float]:
    """Forward, forward and backward (ms), and peak memory above the inputs (MiB)."""
    from triton.testing import do_bench_cudagraph

    x = Inputs.random(shape)
    upstream = torch.randn_like(x.q)

    def forward() -> Tensor:
        return peer(x)

    def both() -> None:
        peer(x).backward(upstream)

    with own_stream():
        both()
        for leaf in x.leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        timing: dict[str, Any] = {"rep": milliseconds, "return_mode": "median"}
        with torch.no_grad():
            alone = do_bench_cudagraph(forward, **timing)
        together = do_bench_cudagraph(both, grad_to_none=x.leaves, **timing)
    return {"forward_ms": alone, "both_ms": together, "peak_mib": peak / 2**20}


@contextmanager
def own_stream() -> Iterator[None]:
    """Graphs cannot be captured on the default stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def run(shapes: tuple[Shape, ...], tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each shape and peer; a peer that fails gives a row that says why."""
    require_gpu("cable bench attention")
    for dim in sorted({shape.dim for shape in shapes}):
        tell(f"gate passed at head dimension {dim}: error ratio {gate(dim):.2f} (2 allowed)")
    for shape in shapes:
        for name, peer in peers(shape).items():
            row: dict[str, Any] = {"bench": "attention", "shape": shape._asdict(), "peer": name, "dtype": "bfloat16"}
            try:
                row |= measure(shape, peer)
            except Exception as error:
                row["error"] = reason(error)
            gc.collect()
            torch.cuda.empty_cache()
            yield row
