"""Which keys a block of rows can leave out, with proof.

Let a block of keys have the mean μ, the largest distance r of a key from μ, and the key n nearest to row i. Since c is
sorted, what the block weighs for row i is at most

    size · exp( q_i·μ + ‖q_i‖ r − g_i |c_i − c_n| ) / Z_i.

Z_i is at least the sum over the keys near row i, computed exactly, plus for each block further away, by Jensen's
inequality, size · exp( q_i·μ − g_i |c_i − c_f| ) with f the block's furthest key. One small product of queries and means
serves both. Blocks are dropped from the far end as long as their bounds add up to less than ε for every row; bidirectional
rows do it at both ends, with ε/2 each. (Means are rounded to the precision of the keys: r is measured from the rounded
mean, and the lower bound gives up ‖q_i‖ times what the rounding moved it.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from cable_attn.attention.fused import _Problem

from cable_attn.attention.kernels import KEYS, LOG2E, SPLIT, _from_base, _potential, _signed, _visible

KEY_BLOCK = KEYS.value
"""Keys are dropped in blocks of so many."""
NEAR = 128
"""How many keys before (and after) a block of rows are counted exactly towards Z."""
WIDE = 64
"""How many blocks of keys are looked at in one step."""
SLACK = 1.001
"""For the rounding of norms and products."""


def live_keys(problem: _Problem, document_ids: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The first live key and the end of the live keys for each block of rows: int32 [B, H, blocks]."""
    from cable_attn.attention.fused import BOUND_ROWS

    q, k = problem.q, problem.k
    causal = problem.flags["CAUSAL"]
    blocks = triton.cdiv(problem.keys, KEY_BLOCK)
    means = torch.empty(*k.shape[:2], blocks, k.shape[3], device=k.device, dtype=k.dtype)
    radii, moved = torch.empty(2, *k.shape[:2], blocks, device=k.device, dtype=torch.float32)
    shape = {"D": problem.flags["D"], "BD": problem.flags["BD"], "BN": KEY_BLOCK}
    _means[(blocks, k.shape[0] * k.shape[1])](
        k, means, radii, moved, *k.stride()[:3], k.shape[1], problem.keys, blocks, **shape, num_warps=4
    )
    rows = triton.cdiv(problem.queries, BOUND_ROWS)
    lo = torch.empty(problem.batch, problem.heads, rows, device=q.device, dtype=torch.int32)
    hi = torch.empty_like(lo)
    first, end = _documents(document_ids, lo)
    flags = {key: value for key, value in problem.flags.items() if key not in ("KERNEL", "BOUNDED", "POTENTIAL")}
    _bounds[(rows, problem.batch * problem.heads)](
        q, k, *problem.bias, means, radii, moved, lo, hi, *problem.masks, first, end,
        *q.stride()[:3], *k.stride()[:3], *problem.sizes, blocks,
        problem.scale * float(LOG2E.value), epsilon if causal else epsilon / 2,
        BM=BOUND_ROWS, BN=KEY_BLOCK, NEAR_KEYS=NEAR, WIDTH=WIDE, SLACK_FACTOR=SLACK, num_warps=8, num_stages=1, **flags,
    )  # fmt: skip
    return lo, hi


def live_rows(lo: Tensor, hi: Tensor, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """For each block of keys the rows from the first to behind the last that need it: int32 [B, H, blocks]."""
    from cable_attn.attention.fused import BOUND_ROWS

    blocks = triton.cdiv(keys, KEY_BLOCK)
    begin = torch.empty(*lo.shape[:2], blocks, device=lo.device, dtype=torch.int32)
    end = torch.empty_like(begin)
    _rows[(triton.cdiv(blocks, WIDE), lo.shape[0] * lo.shape[1])](
        lo, hi, begin, end, lo.shape[2], blocks, queries, BM=BOUND_ROWS, BN=KEY_BLOCK, WIDTH=WIDE
    )
    return begin, end


def _documents(document_ids: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Where the document of each token begins and ends: int32 [B, Tk]."""
    if document_ids is None:
        return unused, unused
    keys = document_ids.shape[1]
    index = torch.arange(keys, device=document_ids.device)
    changed = torch.nn.functional.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    first = torch.where(changed, index, 0).cummax(-1).values
    last = torch.nn.functional.pad(changed[:, 1:], (0, 1), value=True)
    end = torch.where(last, index + 1, keys).flip(-1).cummin(-1).values.flip(-1)
    return first.int().contiguous(), end.int().contiguous()


@triton.jit
def _means(K, MEANS, RADII, MOVED, skb, skh, skt, key_heads, Tk, blocks, D: tl.constexpr, BD: tl.constexpr,
           BN: tl.constexpr):  # fmt: skip
    """For each block of keys its rounded mean, the largest distance from it, and how far the rounding moved it."""
    n = tl.program_id(0)
    bk = tl.program_id(1)
    j = n * BN + tl.arange(0, BN)
    od = tl.arange(0, BD)
    base = K + (bk // key_heads).to(tl.int64) * skb + (bk % key_heads).to(tl.int64) * skh
    mask = (j[:, None] < Tk) & (od[None, :] < D)
    k = tl.load(base + j.to(tl.int64)[:, None] * skt + od[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(k, 0) / tl.minimum(Tk - n * BN, BN).to(tl.float32)
    rounded = mean.to(MEANS.dtype.element_ty)
    away = tl.where(mask, k - rounded.to(tl.float32)[None, :], 0.0)
    moved = mean - rounded.to(tl.float32)
    where = bk.to(tl.int64) * blocks + n
    tl.store(MEANS + where * D + od, rounded, mask=od < D)
    tl.store(RADII + where, tl.sqrt(tl.max(tl.sum(away * away, 1))))
    tl.store(MOVED + where, tl.sqrt(tl.sum(moved * moved, 0)))


@triton.jit
def _products(q, MEANS, block, inside, od, D: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    """q_i·μ for these blocks: [rows, blocks]."""
    place = MEANS + block.to(tl.int64)[None, :] * D + od[:, None]
    means = tl.load(place, mask=inside[None, :] & (od[:, None] < D), other=0.0)
    return tl.dot(q, means, input_precision=PRECISION)


@triton.jit
def _at_key(OFF, BASE, key, inside, base, EXACT: tl.constexpr):
    """c at these keys, from the rows' base."""
    return (_potential(OFF, BASE, key, inside, EXACT) - base).to(tl.float32)


@triton.jit
def _bounds(Q, K, OFF, BASE, G, MEANS, RADII, MOVED, LO, HI, KMASK, DOCS, FIRST, END, sqb, sqh, sqt, skb, skh, skt, H,
            GROUP, Tq, Tk, start, window, blocks, scale2, epsilon, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, NEAR_KEYS: tl.constexpr, WIDTH: tl.constexpr, SLACK_FACTOR: tl.constexpr,
            CAUSAL: tl.constexpr, GAIN: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    pm = tl.program_id(0)
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    bk = b * (H // GROUP) + h // GROUP
    K += b * skb + (h // GROUP) * skh
    OFF += bh.to(tl.int64) * Tk
    BASE += bh * tl.cdiv(Tk, SPLIT)
    KMASK += b * Tk
    DOCS += b * Tk
    MEANS += bk * blocks * D
    RADII += bk * blocks
    MOVED += bk * blocks
    i = pm * BM + tl.arange(0, BM)
    on = tl.arange(0, BN)
    od = tl.arange(0, BD)
    at = i + start
    row = i < Tq
    q = tl.load(Q + b * sqb + h * sqh + i.to(tl.int64)[:, None] * sqt + od[None, :],
                mask=row[:, None] & (od[None, :] < D), other=0.0)  # fmt: skip
    slope = tl.full([BM], 1.0, tl.float32)
    if GAIN:
        slope = tl.load(G + bh.to(tl.int64) * Tq + i, mask=row, other=0.0)
    slope = slope * LOG2E
    base = _potential(OFF, BASE, pm * BM + start, True, PACKED)
    ci = (_potential(OFF, BASE, at, row, PACKED) - base).to(tl.float32)
    wide = q.to(tl.float32)
    reach = tl.sqrt(tl.sum(wide * wide, 1)) * scale2 * SLACK_FACTOR
    begins = tl.zeros([BM], tl.int32)
    ends = tl.zeros([BM], tl.int32) + Tk
    if PACKED:
        begins = tl.load(FIRST + b * Tk + at, mask=row, other=0)
        ends = tl.load(END + b * Tk + at, mask=row, other=0)

    # Z: the near keys exactly. All logarithms are to base 2.
    first = pm * BM + start
    m = tl.full([BM], float("-inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    lo = tl.maximum((first - NEAR_KEYS) // BN * BN, 0)
    hi = tl.minimum(first + BM, Tk)
    if not CAUSAL:
        hi = tl.minimum(tl.cdiv(first + BM + NEAR_KEYS, BN) * BN, Tk)
    for n in range(lo, hi, BN):
        j = n + on
        k = tl.load(K + n * tl.full([], 1, tl.int64) * skt + on[None, :] * skt + od[:, None],
                    mask=(j[None, :] < Tk) & (od[:, None] < D), other=0.0)  # fmt: skip
        cj = _from_base(OFF, BASE, n, on, base, Tk, True, PACKED)
        x = tl.dot(q, k, input_precision=PRECISION) * scale2
        x -= slope[:, None] * _signed(ci[:, None] - cj[None, :], at[:, None], j[None, :], CAUSAL)
        seen = _visible(at[:, None], j[None, :], KMASK, DOCS, Tk, window, CAUSAL, WINDOW, PADDED, PACKED)
        x = tl.where(seen, x, float("-inf"))
        top = tl.maximum(m, tl.max(x, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        norm = norm * tl.exp2(m - safe) + tl.sum(tl.exp2(x - safe[:, None]), 1)
        m = top
    total = tl.where(norm > 0.0, m + tl.log2(tl.where(norm > 0.0, norm, 1.0)), float("-inf"))

    # Z: at least so much more from the blocks further away, if all their keys count.
    some = tl.arange(0, WIDTH)
    if not (WINDOW or PADDED):
        more = tl.zeros([BM], tl.float32)
        for far in range(0, lo // BN, WIDTH):
            block = far + some
            inside = block < lo // BN
            x = _products(q, MEANS, block, inside, od, D, BD, PRECISION) * scale2
            x -= reach[:, None] * tl.load(MOVED + block, mask=inside, other=0.0)[None, :]
            x -= slope[:, None] * (ci[:, None] - _at_key(OFF, BASE, block * BN, inside, base, PACKED)[None, :])
            counts = inside[None, :] & (begins[:, None] <= block[None, :] * BN)
            more += tl.sum(tl.where(counts, tl.exp2(tl.minimum(x - total[:, None], 60.0)), 0.0), 1) * BN
        if not CAUSAL:
            for far in range(tl.cdiv(hi, BN), blocks, WIDTH):
                block = far + some
                inside = block < blocks
                last = tl.minimum((block + 1) * BN, Tk) - 1
                x = _products(q, MEANS, block, inside, od, D, BD, PRECISION) * scale2
                x -= reach[:, None] * tl.load(MOVED + block, mask=inside, other=0.0)[None, :]
                x -= slope[:, None] * (_at_key(OFF, BASE, last, inside, base, PACKED)[None, :] - ci[:, None])
                counts = inside[None, :] & (ends[:, None] > last[None, :])
                size = (last + 1 - block * BN).to(tl.float32)
                weight = tl.exp2(tl.minimum(x - total[:, None], 60.0)) * size[None, :]
                more += tl.sum(tl.where(counts, weight, 0.0), 1)
        total += tl.log2(1.0 + tl.where(norm > 0.0, more, 0.0))
    budget = total + tl.log2(epsilon)

    # Drop blocks from the left while the largest shares of any row add up to less than the budget.
    where = bh.to(tl.int64) * tl.num_programs(0) + pm
    limit = first // BN
    left = limit * 0
    spent = tl.full([], 0.0, tl.float32)
    going = limit > 0
    while going:
        block = left + some
        inside = block < limit
        last = block * BN + BN - 1
        x = _products(q, MEANS, block, inside, od, D, BD, PRECISION) * scale2
        x += reach[:, None] * tl.load(RADII + block, mask=inside, other=0.0)[None, :]
        x -= slope[:, None] * (ci[:, None] - _at_key(OFF, BASE, last, inside, base, PACKED)[None, :])
        counts = row[:, None] & (begins[:, None] <= last[None, :])
        share = tl.max(tl.where(counts, tl.exp2(tl.minimum(x - budget[:, None], 60.0)), 0.0), 0) * BN
        share = tl.where(inside, share, 2.0)
        fit = tl.sum((spent + tl.cumsum(share, 0) < 1.0).to(tl.int32))
        spent += tl.sum(share)
        left += fit
        going = (fit == WIDTH) & (left < limit)
    tl.store(LO + where, left * BN)

    right = limit * 0
    if not CAUSAL:
        spent = tl.full([], 0.0, tl.float32)
        going = limit >= 0
        while going:
            block = blocks - 1 - right - some
            inside = block * BN >= first + BM
            x = _products(q, MEANS, block, inside, od, D, BD, PRECISION) * scale2
            x += reach[:, None] * tl.load(RADII + block, mask=inside, other=0.0)[None, :]
            x -= slope[:, None] * (_at_key(OFF, BASE, block * BN, inside, base, PACKED)[None, :] - ci[:, None])
            counts = row[:, None] & (ends[:, None] > block[None, :] * BN)
            share = tl.max(tl.where(counts, tl.exp2(tl.minimum(x - budget[:, None], 60.0)), 0.0), 0) * BN
            share = tl.where(inside, share, 2.0)
            fit = tl.sum((spent + tl.cumsum(share, 0) < 1.0).to(tl.int32))
            spent += tl.sum(share)
            right += fit
            going = fit == WIDTH
    tl.store(HI + where, tl.where(right > 0, (blocks - right) * BN, Tk))


@triton.jit
def _rows(LO, HI, BEGIN, END, row_blocks, blocks, Tq, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr):
    bh = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    begin = tl.zeros([WIDTH], tl.int32) + Tq
    end = tl.zeros([WIDTH], tl.int32)
    for first in range(0, row_blocks, WIDTH):
        m = first + tl.arange(0, WIDTH)
        lo = tl.load(LO + bh * row_blocks + m, mask=m < row_blocks, other=2147483647)
        hi = tl.load(HI + bh * row_blocks + m, mask=m < row_blocks, other=0)
        needs = (lo[:, None] < (n[None, :] + 1) * BN) & (hi[:, None] > n[None, :] * BN)
        begin = tl.minimum(begin, tl.min(tl.where(needs, m[:, None] * BM, 2147483647), 0))
        end = tl.maximum(end, tl.max(tl.where(needs, (m[:, None] + 1) * BM, 0), 0))
    tl.store(BEGIN + bh * blocks + n, begin, mask=n < blocks)
    tl.store(END + bh * blocks + n, tl.minimum(end, Tq), mask=n < blocks)
