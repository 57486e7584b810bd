"""The fused backend: Triton kernels as PyTorch operators, with gradients for q, k, v, the potential and the gain."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cable_attn.attention import decoding
from cable_attn.attention.call import BLOCK_ELEMENTS, Call
from cable_attn.attention.operands import (
    BOUND_ROWS,
    COLUMNS,
    DENSE,
    KERNELS,
    LINEAR,
    LOG2E,
    SPLIT,
    TOEPLITZ,
    masks,
    padded,
    potential,
    rows_of_numbers,
)
from cable_attn.attention.tiles import INTERPRETED, USES_COLUMNS, Tile, Tiles, generation, tiles_for
from cable_attn.bias import Bias, FunctionBias, PotentialBias, ToeplitzBias, TokenBias
from cable_attn.devices import TRITON, current, interpreting
from cable_attn.errors import CableError

NAME = "triton"
LARGEST_HEAD = 256
PROGRAMS = 2048
"""How many programs at least sum the gradient of a table, if the batch can be cut into so many."""
FEW_SCORES = 2**30
"""With fewer in a text (16 heads of 8192 tokens), none is left out: to find out which can be takes longer."""


def refuses(call: Call) -> str | None:
    q = call.q
    if not TRITON:
        return "the package triton is not installed (pip install 'cable-attn[triton]')"
    if q.device.type != "cuda" and not interpreting():
        return f"the fused kernels need a GPU, the tensors are on {q.device.type} (TRITON_INTERPRET=1 runs them slowly)"
    if interpreting() and q.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly; use float32 or float16 there"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the fused kernels take bfloat16, float16 and float32, not {q.dtype}"
    if q.shape[-1] % 8 or not 16 <= q.shape[-1] <= LARGEST_HEAD or call.v.shape[-1] != q.shape[-1]:
        return f"head dimensions must be multiples of 8 from 16 to {LARGEST_HEAD}, the same for q, k and v"
    if call.mix is not None:
        return "this encoding changes the scores themselves (mix), and the fused kernels do not hand them out"
    if call.bias is not None and not isinstance(call.bias, (PotentialBias, TokenBias, ToeplitzBias, FunctionBias)):
        return f"the fused kernels take no {type(call.bias).__name__}"
    if (kernel := getattr(call.bias, "kernel", None)) not in KERNELS:
        known = ", ".join(repr(name) for name in KERNELS if name)
        return f"the fused kernels do not bend a bias with {kernel!r}, only with {known}"
    if call.scale <= 0:
        return f"the fused kernels need a positive scale, got {call.scale}"
    if call.softcap is not None:
        return "the fused kernels have no soft-capping"
    if call.dropout:
        return "the fused kernels have no attention dropout"
    if call.prune and q.dtype == torch.float32 and q.shape[-1] > 128:
        return "pruning in float32 takes head dimensions up to 128: the bounds need more shared memory than GPUs have"
    start = call.layout.query_start
    if not call.layout.causal and isinstance(start, int) and not 0 <= start <= call.k.shape[2] - q.shape[2]:
        return "the fused kernels want every query to stand at a key"
    if isinstance(start, Tensor) and not decoding.serves(call):
        return (
            "the queries' place is known only on the device (a static cache), and they are too many for the kernel "
            f"that takes that (more than {decoding.ROWS} for a key head), or the call wants gradients"
        )
    if isinstance(call.bias, FunctionBias) and not decoding.serves(call):
        first = torch.zeros(1, dtype=torch.long, device=q.device)
        if call.bias.rows(first, first, call.layout.query_start).shape[0] > 1:
            return "this bias differs from text to text (padding or documents move the places it depends on)"
        if q.shape[1] * q.shape[2] * call.k.shape[2] > BLOCK_ELEMENTS:
            return f"a bias of no simpler form is written out, and only up to {BLOCK_ELEMENTS} numbers"
    return None


def defers(call: Call) -> str | None:
    """Why ``auto`` should look further although this backend could serve the call."""
    if call.q.device.type != "cuda":
        return "the interpreter is for tests"
    layout = call.layout
    masked = layout.key_mask is not None or layout.document_ids is not None or layout.window is not None
    if call.bias is None and not masked and (layout.is_square or not layout.causal):
        return "without a bias or a mask there is nothing to fuse"
    return None


def run(call: Call) -> Tensor:
    return decoding.run(call) if decoding.serves(call) else _fused(call)[0]


def log_sum_exp(call: Call) -> Tensor:
    """Of each row's logits, [B, H, Tq]; −inf for a row that sees nothing."""
    lse = _fused(call)[1]
    return torch.where(lse == math.inf, -math.inf, lse * math.log(2))


def kept_share(call: Call) -> Tensor:
    """The share of key blocks that pruning leaves to compute, [B, H]."""
    *_, lo, hi = _fused(call)
    if not lo.numel():
        return torch.ones(call.q.shape[:2], device=call.q.device)
    layout = call.layout
    assert isinstance(layout.query_start, int)
    first = torch.arange(lo.shape[-1], device=lo.device) * BOUND_ROWS + layout.query_start
    ends = (first + BOUND_ROWS).clamp(max=call.k.shape[2]) if layout.causal else torch.full_like(first, call.k.shape[2])
    return (torch.minimum(hi, ends) - lo).clamp(min=0).sum(-1) / ends.sum()


def _fused(call: Call) -> tuple[Tensor, ...]:
    """out, log-sum-exp in base 2, the split potential, and the live keys of each block of rows."""
    heads, layout = call.q.shape[1], call.layout
    c, g, kernel = potential(call)
    if call.bias is not None and c is None:
        c, kernel = _table(call.bias, call)
    together = call.together is not None and call.together.stride(-1) == 1
    tensors = (call.together, None, None) if together else rows_of_numbers(call.q, call.k, call.v)
    numbers = (call.scale, layout.causal, layout.query_start, layout.window or 0, kernel, _share_to_prune(call))
    # The operator is what torch.compile sees; in eager mode its dispatch would cost more than a short text's kernels.
    serve = torch.ops.cable_attn.fused if torch.compiler.is_compiling() else _Fused.apply
    return serve(*tensors, c, g, *masks(layout), *numbers, heads if together else 0)


def _share_to_prune(call: Call) -> float:
    _, heads, queries, _ = call.q.shape
    return call.prune if call.prune and heads * queries * call.k.shape[2] >= FEW_SCORES else 0.0


def _table(bias: Bias, call: Call) -> tuple[Tensor, int]:
    """A bias without a potential as the kernels read it: for each head and distance from 1 − Tk on, or written out."""
    heads, queries, keys = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    start = call.layout.query_start
    assert isinstance(start, int)
    if isinstance(bias, ToeplitzBias):
        distance = torch.arange(start - keys + 1, start + queries, device=call.q.device)
        entry = (distance + bias.zero).clamp(0, bias.table.shape[-1] - 1)
        return bias.table.float()[:, entry].expand(heads, -1), TOEPLITZ
    i, j = call.indices(range(queries))
    return bias.rows(i, j, start)[0].float().expand(heads, -1, -1), DENSE


class _Problem:
    """What the kernels are told about a call: pointers, sizes and compile-time flags."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        off: Tensor,
        base: Tensor,
        g: Tensor | None,
        key_mask: Tensor | None,
        document_ids: Tensor | None,
        scale: float,
        causal: bool,
        start: int,
        window: int,
        kernel: int,
        prune: float,
    ):
        self.batch, self.heads, self.queries, dim = q.shape
        self.q, self.k, self.keys, self.scale = q, k, k.shape[2], scale
        self.sizes = (self.heads, self.heads // k.shape[1], self.queries, self.keys, start, window)
        padded_dim = padded(dim)
        self.tiles: Tiles = INTERPRETED
        if not interpreting():
            self.tiles = tiles_for(padded_dim, q.dtype, kernel, _capability(q.device))
        # A pointer that is never read stands in for what is absent.
        self.bias = (off, base, q if g is None else g)
        self.masks = (q if key_mask is None else key_mask, q if document_ids is None else document_ids)
        self.flags: dict[str, Any] = {
            "D": dim,
            "BD": padded_dim,
            "CAUSAL": causal,
            "POTENTIAL": off.numel() > 0 and kernel < TOEPLITZ,
            "GAIN": g is not None,
            "KERNEL": kernel,
            "WINDOW": window > 0,
            "PADDED": key_mask is not None,
            "PACKED": document_ids is not None,
            "BOUNDED": prune > 0,
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        }

    def backward_flags(self, need_bias: bool) -> dict[str, Any]:
        """SUMS: the tensor cores sum the gradients of the bias; FOLD: they add the bias too (see backward.py)."""
        potential, packed = self.flags["POTENTIAL"], self.flags["PACKED"]
        sums = potential and not packed and _uses_columns(self.q)
        fold = sums and self.flags["CAUSAL"] and self.flags["KERNEL"] == LINEAR
        return {"NEED_C": need_bias and potential, "SUMS": sums, "FOLD": fold}

    def options(self, tile: Tile) -> dict[str, Any]:
        return {
            **self.flags,
            "BM": tile.queries,
            "BN": tile.keys,
            "LATE": tile.late and self.flags["KERNEL"] < TOEPLITZ,
            "EVEN": self.queries % tile.queries == 0 and self.keys % tile.keys == 0,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def some(self, *names: str) -> dict[str, Any]:
        return {name: self.flags[name] for name in names}


def _forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    c: Tensor | None,
    g: Tensor | None,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    scale: float,
    causal: bool,
    start: int,
    window: int,
    kernel: int,
    prune: float,
    together: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, log-sum-exp, the split potential, and the live keys.

    together: 0, or how many of q's heads are queries; the rest are the keys and the values.
    """
    from cable_attn.attention import kernels, pruning

    q, k, v = _apart(q, k, v, together)
    batch, heads, queries, dim = q.shape
    out = torch.empty(batch, queries, heads, dim, device=q.device, dtype=q.dtype).transpose(1, 2)
    lse = torch.empty(batch, heads, queries, device=q.device, dtype=torch.float32)
    with current(q.device):
        off, base = _split(q, c, packed=document_ids is not None, table=kernel >= TOEPLITZ)
        problem = _Problem(q, k, off, base, g, key_mask, document_ids, scale, causal, start, window, kernel, prune)
        lo, hi = pruning.live_keys(problem, document_ids, prune) if prune > 0 else (_none(q), _none(q))
        tile = problem.tiles.forward
        kernels.forward[(_blocks(queries, tile.queries), batch * heads)](
            q, k, v, *problem.bias, out, lse, *problem.masks, lo, hi,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *problem.sizes, scale * LOG2E,
            **problem.options(tile),
        )  # fmt: skip
    return out, lse, off, base, lo, hi


def _split(q: Tensor, c: Tensor | None, packed: bool, table: bool = False) -> tuple[Tensor, Tensor]:
    """The potential as the kernels read it: an fp32 offset and an fp64 base for each SPLIT keys; a table in base 2."""
    from cable_attn.attention import kernels

    if c is None:
        return _none(q), _none(q)
    if table:
        return (c * LOG2E).contiguous(), _none(q)
    if packed:
        return c.to(torch.float64, copy=True).contiguous(), _none(q)  # an operator never gives back its input
    batch, heads, keys = c.shape
    blocks = _blocks(keys, SPLIT)
    off = torch.empty(batch, heads, keys, device=c.device, dtype=torch.float32)
    base = torch.empty(batch, heads, blocks, device=c.device, dtype=torch.float64)
    kernels.split_potential[(blocks, batch * heads)](c, off, base, *c.stride(), heads, keys, BLOCK=SPLIT)
    return off, base


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    g: Tensor | None,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    out: Tensor,
    lse: Tensor,
    off: Tensor,
    base: Tensor,
    lo: Tensor,
    hi: Tensor,
    scale: float,
    causal: bool,
    start: int,
    window: int,
    kernel: int,
    prune: float,
    together: int,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients for q, k, v, and for c and g (empty when they are not needed)."""
    from cable_attn.attention import backward, pruning

    gradients = _empty_gradients(q, k, g, off, need_bias)
    dq, dk, dv = _apart(*gradients[:3], together)
    dc, dg = gradients[3:]
    q, k, v = _apart(q, k, v, together)
    do = do if do.stride(-1) == 1 else do.contiguous()
    batch, heads, queries, _ = q.shape
    problem = _Problem(q, k, off, base, g, key_mask, document_ids, scale, causal, start, window, kernel, prune)
    delta, shift, own = torch.empty_like(lse), lse, lse
    if problem.flags["POTENTIAL"]:
        own = torch.empty_like(lse)
        shift = torch.empty_like(lse) if causal and kernel == LINEAR else lse
    flags = problem.backward_flags(need_bias)
    columns, rows = (
        q.new_empty(batch, heads, length, COLUMNS) if flags["SUMS"] else _none(q) for length in (problem.keys, queries)
    )
    tensors = (q, k, v, *problem.bias, columns, do, shift, delta, own, rows)
    numbers = (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *problem.sizes, scale, scale * LOG2E,
    )  # fmt: skip
    with current(q.device):
        backward.row_dots[(_blocks(queries, 64), batch * heads)](
            out, do, lse, *problem.bias, delta, shift, own, rows, *out.stride()[:3], *do.stride()[:3],
            heads, queries, problem.keys, start, scale, BM=64, num_warps=4, SUMS=flags["SUMS"],
            **problem.some("D", "BD", "CAUSAL", "POTENTIAL", "GAIN", "KERNEL", "PACKED"),
        )  # fmt: skip
        if flags["SUMS"]:
            backward.potential_columns[(_blocks(off.numel(), 256),)](off, columns, off.numel(), BLOCK=256)
        begin, end = pruning.live_rows(lo, hi, queries, problem.keys) if prune > 0 else (lo, hi)
        tile = problem.tiles.keys
        backward.backward_keys[(_blocks(problem.keys, tile.keys), batch * k.shape[1])](
            *tensors, dk, dv, dc, *problem.masks, begin, end, *dk.stride()[:3], *numbers,
            **flags, **problem.options(tile),
        )  # fmt: skip
        tile = problem.tiles.queries
        backward.backward_queries[(_blocks(queries, tile.queries), batch * heads)](
            *tensors, dq, dg, dc, *problem.masks, lo, hi, *dq.stride()[:3], *numbers, **flags, **problem.options(tile)
        )
        if need_bias and kernel >= TOEPLITZ:
            dc = _table_gradient(problem, (q, k, v, off, do, lse, delta), numbers, dc)
    return (*gradients[:3], dc, dg)


def _apart(q: Tensor, k: Tensor | None, v: Tensor | None, together: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a tensor that holds all three, one after the other along the heads."""
    if not together:
        assert k is not None and v is not None
        return q, k, v
    rest = (q.shape[1] - together) // 2
    return q.split([together, rest, rest], dim=1)


def _table_gradient(problem: _Problem, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], dc: Tensor) -> Tensor:
    from cable_attn.attention import backward

    block = min(*problem.tiles.keys[:2], 64)
    row_tiles, key_tiles = _blocks(problem.queries, block), _blocks(problem.keys, block)
    toeplitz = problem.flags["KERNEL"] == TOEPLITZ
    tiles = row_tiles + key_tiles - 1 if toeplitz else row_tiles * key_tiles
    parts = min(_blocks(PROGRAMS, tiles * problem.heads), problem.batch) if toeplitz else 1
    sums = dc.new_empty(parts, problem.heads, tiles, block, block) if toeplitz else dc
    *numbers_before, _, scale2 = numbers
    backward.backward_table[(tiles, problem.heads, parts)](
        *tensors, sums, *problem.masks, *numbers_before, scale2, problem.batch, BLOCK=block, num_warps=4, num_stages=2,
        **problem.some("D", "BD", "CAUSAL", "KERNEL", "WINDOW", "PADDED", "PACKED", "PRECISION"),
    )  # fmt: skip
    if not toeplitz:
        return dc
    # Row r, column s of a tile belongs to distance r − s: shear the rows, sum them, and add where tiles overlap.
    sheared = torch.nn.functional.pad(sums.sum(0).flip(-1), (0, block)).flatten(-2)[..., :-block]
    lines = sheared.unflatten(-1, (block, 2 * block - 1)).sum(-2)
    lines = torch.nn.functional.pad(lines, (0, 1)).unflatten(-1, (2, block))
    whole = torch.nn.functional.pad(lines[:, :, 0], (0, 0, 0, 1)) + torch.nn.functional.pad(
        lines[:, :, 1], (0, 0, 1, 0)
    )
    first = key_tiles * block - problem.keys
    return whole.flatten(-2)[:, first : first + dc.shape[-1]].contiguous()


def _uses_columns(q: Tensor) -> bool:
    """bfloat16 has the range for it; the interpreter, which cannot multiply bfloat16, shows the algebra in float16."""
    if q.device.type == "cuda":
        return q.dtype == torch.bfloat16 and generation(_capability(q.device)) in USES_COLUMNS
    return q.dtype == torch.float16


def _empty_gradients(
    q: Tensor, k: Tensor | None, g: Tensor | None, off: Tensor, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dc = q.new_empty(off.shape if need_bias else (0,), dtype=torch.float32)
    dg = q.new_empty(g.shape if need_bias and g is not None else (0,), dtype=torch.float32)
    if k is None:  # one tensor for all three, as the projection that made them lays it out
        batch, heads, length, dim = q.shape
        return q.new_empty(batch, length, heads, dim).transpose(1, 2), q.new_empty(0), q.new_empty(0), dc, dg
    return q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty(k.shape), dc, dg


class _Fused(torch.autograd.Function):
    """The eager path."""

    @staticmethod
    def forward(ctx, q, k, v, c, g, key_mask, document_ids, *numbers):  # type: ignore[no-untyped-def]
        outputs = _forward(q, k, v, c, g, key_mask, document_ids, *numbers)
        _save(ctx, (q, k, v, c, g, key_mask, document_ids, *numbers), outputs)
        return outputs

    @staticmethod
    def backward(ctx, do, *unused):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():  # create_graph=True
            raise CableError("the fused kernels have no second derivatives. Use backend='reference' for them.")
        return _gradients(ctx, do, _backward)


# The same for torch.compile, which sees two opaque operators.
_operator = torch.library.custom_op("cable_attn::fused", _forward, mutates_args=())
_backward_operator = torch.library.custom_op("cable_attn::fused_backward", _backward, mutates_args=())


@_operator.register_fake
def _(q, k, v, c, g, key_mask, document_ids, scale, causal, start, window, kernel, prune, together):  # type: ignore[no-untyped-def]
    q, k, v = _apart(q, k, v, together)
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    out = q.new_empty(batch, queries, heads, dim).transpose(1, 2)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    packed = document_ids is not None
    table = kernel >= TOEPLITZ
    off = q.new_empty(0 if c is None else c.shape, dtype=torch.float64 if packed and not table else torch.float32)
    base = q.new_empty(batch, heads, _blocks(keys, SPLIT), dtype=torch.float64)
    bounds = (batch, heads, _blocks(queries, BOUND_ROWS))
    if c is None:
        off, base = _none(q), _none(q)
    elif packed or table:
        base = _none(q)
    lo, hi = (q.new_empty(bounds, dtype=torch.int32) if prune > 0 else _none(q) for _ in range(2))
    return out, lse, off, base, lo, hi


@_backward_operator.register_fake
def _(do, q, k, v, g, key_mask, document_ids, out, lse, off, *rest):  # type: ignore[no-untyped-def]
    return _empty_gradients(q, k, g, off, need_bias=rest[-1])


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, c, g, key_mask, document_ids, *ctx.numbers = inputs
    ctx.potential = None if c is None else c.dtype
    ctx.save_for_backward(q, k, v, g, key_mask, document_ids, *output)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx, do, backward):  # type: ignore[no-untyped-def]
    need_bias = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    dq, dk, dv, dc, dg = backward(do, *ctx.saved_tensors, *ctx.numbers, need_bias)
    if ctx.numbers[-1]:
        dk = dv = None
    dc = dc.to(ctx.potential) if ctx.needs_input_grad[3] else None
    return dq, dk, dv, dc, dg if ctx.needs_input_grad[4] else None, *[None] * 9


_operator.register_autograd(
    lambda ctx, do, *unused: _gradients(ctx, do, torch.ops.cable_attn.fused_backward), setup_context=_save
)


def _none(q: Tensor) -> Tensor:
    return torch.empty(0, device=q.device, dtype=torch.int32)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _blocks(length: int, size: int) -> int:
    return (length + size - 1) // size
