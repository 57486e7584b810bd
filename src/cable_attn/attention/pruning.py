"""Which keys a block of rows can leave out, with proof.

Let a block of n keys have the mean μ, the largest distance r of a key from it, the largest variance λ in any direction,
and the key f nearest to row i. Write R = ‖q_i‖ r and ρ = λ/r². The logits of the keys around their mean are at most R and
their variance at most ρR², so by Bennett's inequality, and since c is sorted, the block weighs for row i at most

    n · exp( q_i·μ − g_i |c_i − c_f| ) · (1 + ρ exp R) / Z_i.

Z_i is at least the sum over the keys near row i, computed exactly, plus for each block further away, by Jensen's
inequality, n · exp( q_i·μ − g_i |c_i − c_l| ) with l the block's furthest key. One small product of queries and means serves
both. Blocks are dropped from the far end as long as their bounds add up to less than ε for every row, first large blocks,
then small ones; bidirectional rows do it at both ends, with ε/2 each.

In practice λ is bounded by the Frobenius norm of the covariance. Means are rounded to the precision of the keys: both
bounds give up ‖q_i‖ times what that rounding, and the rounding of the product, may move them. A thousandth of ε is kept
back for the rounding of the sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from cable_attn.attention.fused import _Problem

from cable_attn.attention import operands
from cable_attn.attention.kernels import LOG2E, SPLIT, _from_base, _potential, _signed, _visible
from cable_attn.attention.operands import BOUND_ROWS, KEY_BLOCK

LARGE_BLOCK = 512
"""Far away, where nearly everything is dropped, in blocks of so many: a multiple of the small ones."""
NEAR = 128
"""How many keys before (and after) a block of rows are counted exactly towards Z."""
WIDE = 32
"""How many blocks of keys are looked at in one step."""
SLACK = 1.001
"""For the rounding of norms and products."""
SPREAD_SLACK = 1.05
"""For the rounding of a covariance whose inputs have eight bits: ‖(A + E)(A + E)ᵀ − AAᵀ‖ ≤ 2‖A‖‖E‖ and more, below 2 %."""


def live_keys(problem: _Problem, document_ids: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The first live key and the end of the live keys for each block of rows: int32 [B, H, blocks]."""
    q, k = problem.q, problem.k
    causal = problem.flags["CAUSAL"]
    rows = triton.cdiv(problem.queries, BOUND_ROWS)
    lo = torch.empty(problem.batch, problem.heads, rows, device=q.device, dtype=torch.int32)
    hi = torch.empty_like(lo)
    first, end = _documents(document_ids, lo)
    flags = {key: value for key, value in problem.flags.items() if key not in ("KERNEL", "BOUNDED", "POTENTIAL")}
    _bounds[(rows, problem.batch * problem.heads)](
        q, k, *problem.bias, *_summaries(problem, KEY_BLOCK), *_summaries(problem, LARGE_BLOCK), lo, hi, *problem.masks,
        first, end, *q.stride()[:3], *k.stride()[:3], *problem.sizes,
        problem.scale * operands.LOG2E, epsilon if causal else epsilon / 2,
        BM=BOUND_ROWS, BN=KEY_BLOCK, LARGE=LARGE_BLOCK, NEAR_KEYS=NEAR, SLACK_FACTOR=SLACK, num_warps=4,
        WIDTH=WIDE if q.dtype != torch.float32 else 16,  # exact fp32 products take the compiler long
        num_stages=1, maxnreg=128 if problem.flags["BD"] <= 64 else None, **flags,
    )  # fmt: skip
    return lo, hi


def _summaries(problem: _Problem, size: int) -> tuple[Tensor, Tensor]:
    """The means of all blocks of keys, and their radii, spreads and rounding."""
    k = problem.k
    blocks = triton.cdiv(problem.keys, size)
    means = torch.empty(*k.shape[:2], blocks, k.shape[3], device=k.device, dtype=k.dtype)
    numbers = torch.empty(*k.shape[:2], blocks, 4, device=k.device, dtype=torch.float32)
    _summarise[(blocks, k.shape[0] * k.shape[1])](
        k, means, numbers, *k.stride()[:3], k.shape[1], problem.keys, blocks,
        D=problem.flags["D"], BD=problem.flags["BD"], BN=size, BK=min(size, 2 * KEY_BLOCK), SLACK_FACTOR=SPREAD_SLACK,
        num_warps=4 if size == KEY_BLOCK else 8,
    )  # fmt: skip
    return means, numbers


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
def _load_keys(K, j, skt, Tk, od, D: tl.constexpr):
    return tl.load(
        K + j.to(tl.int64)[:, None] * skt + od[None, :], mask=(j[:, None] < Tk) & (od[None, :] < D), other=0.0
    )


@triton.jit
def _summarise(K, MEANS, NUMBERS, skb, skh, skt, key_heads, Tk, blocks, D: tl.constexpr, BD: tl.constexpr,
               BN: tl.constexpr, BK: tl.constexpr, SLACK_FACTOR: tl.constexpr):  # fmt: skip
    n = tl.program_id(0)
    _summarise_block(n, K, MEANS, NUMBERS, skb, skh, skt, key_heads, Tk, blocks, D, BD, BN, BK, SLACK_FACTOR)


@triton.jit
def summarise_new(K, MEANS, NUMBERS, START, skb, skh, skt, key_heads, Tk, blocks, place, Tq, D: tl.constexpr,
                  BD: tl.constexpr, BN: tl.constexpr, KNOWN: tl.constexpr, ALL: tl.constexpr,
                  SLACK_FACTOR: tl.constexpr):  # fmt: skip
    """The blocks that the keys from ``start`` to ``start + Tq`` complete; ALL: and every one before."""
    start = place
    if not KNOWN:
        start = tl.load(START).to(tl.int32)
    n = tl.program_id(0)
    if not ALL:
        n += start // BN
    if (n + 1) * BN <= start + Tq:
        _summarise_block(n, K, MEANS, NUMBERS, skb, skh, skt, key_heads, Tk, blocks, D, BD, BN, BN, SLACK_FACTOR)


@triton.jit
def _summarise_block(n, K, MEANS, NUMBERS, skb, skh, skt, key_heads, Tk, blocks, D: tl.constexpr, BD: tl.constexpr,
                     BN: tl.constexpr, BK: tl.constexpr, SLACK_FACTOR: tl.constexpr):  # fmt: skip
    """Of block n of the keys the rounded mean; the radius, log2 of ρ (small blocks only), how far the rounding moved."""
    bk = tl.program_id(1)
    od = tl.arange(0, BD)
    K += (bk // key_heads).to(tl.int64) * skb + (bk % key_heads).to(tl.int64) * skh
    count = tl.minimum(Tk - n * BN, BN).to(tl.float32)
    total = tl.zeros([BD], tl.float32)
    for part in range(0, BN, BK):
        total += tl.sum(_load_keys(K, n * BN + part + tl.arange(0, BK), skt, Tk, od, D).to(tl.float32), 0)
    mean = total / count
    rounded = mean.to(MEANS.dtype.element_ty)
    moved = mean - rounded.to(tl.float32)
    furthest = tl.sum(mean * mean) * 1e-5  # a radius so small is rounding, and its ρ would be anything
    spread = tl.full([], 0.0, tl.float32)  # log2 of ρ = 1
    for part in range(0, BN, BK):
        j = n * BN + part + tl.arange(0, BK)
        away = _load_keys(K, j, skt, Tk, od, D).to(tl.float32) - mean[None, :]
        away = tl.where((j[:, None] < Tk) & (od[None, :] < D), away, 0.0)
        furthest = tl.maximum(furthest, tl.max(tl.sum(away * away, 1)))
        if BN == BK:
            low = (away / tl.maximum(tl.sqrt(furthest), 1e-30)).to(MEANS.dtype.element_ty)
            product = tl.dot(low, tl.trans(low))
            norm = tl.sqrt(tl.sum(tl.sum(product * product, 1)))
            spread = tl.minimum(tl.log2(tl.maximum(norm, 1e-30) * SLACK_FACTOR / count), 0.0)
    where = bk.to(tl.int64) * blocks + n
    tl.store(MEANS + where * D + od, rounded, mask=od < D)
    tl.store(NUMBERS + where * 4, tl.sqrt(furthest))
    tl.store(NUMBERS + where * 4 + 1, spread)
    rounding = tl.sqrt(tl.sum(mean * mean, 0)) * 8e-6  # of the product with a query, 64 terms in fp32
    tl.store(NUMBERS + where * 4 + 2, tl.sqrt(tl.sum(moved * moved, 0)) + rounding)


@triton.jit
def _load_numbers(NUMBERS, OFF, BASE, block, key, inside, base, PACKED: tl.constexpr):
    """Radius, spread, rounding, and the potential at ``key`` from the rows' base, for each block.

    As rows of a small tile, so that each thread loads one number and not a whole row of them.
    """
    row = tl.arange(0, 4)[:, None]
    numbers = tl.load(NUMBERS + block[None, :] * 4 + row, mask=inside[None, :] & (row < 3), other=0.0)
    radius = tl.sum(tl.where(row == 0, numbers, 0.0), 0)
    spread = tl.sum(tl.where(row == 1, numbers, 0.0), 0)
    moved = tl.sum(tl.where(row == 2, numbers, 0.0), 0)
    first = inside[None, :] & (row == 0)
    near = (_potential(OFF, BASE, key[None, :] + row * 0, first, PACKED) - base).to(tl.float32)
    return radius, spread, moved, tl.sum(tl.where(first, near, 0.0), 0)


@triton.jit
def _mean_logits(q, slope, ci, MEANS, block, inside, c, od, scale2, D: tl.constexpr, BD: tl.constexpr,
                 LEFT: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """q_i·μ − g_i |c_i − c| for these blocks, in base 2: [rows, blocks]."""
    place = MEANS + block.to(tl.int64)[None, :] * D + od[:, None]
    means = tl.load(place, mask=inside[None, :] & (od[:, None] < D), other=0.0)
    x = tl.dot(q, means, input_precision=PRECISION) * scale2
    if LEFT:
        x += slope[:, None] * (c[None, :] - ci[:, None])
    else:
        x += slope[:, None] * (ci[:, None] - c[None, :])
    return x


@triton.jit
def _at_least(begin, end, total, q, reach, slope, ci, base, begins, ends, MEANS, NUMBERS, OFF, BASE, Tk, od, scale2,
              SIZE: tl.constexpr, WIDTH: tl.constexpr, LEFT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
              PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """What the blocks from ``begin`` to ``end`` add to Z at least, as a share of 2 to the ``total``."""
    more = tl.zeros_like(total)
    for some in range(begin, end, WIDTH):
        block = some + tl.arange(0, WIDTH)
        inside = block < end
        last = tl.minimum((block + 1) * SIZE, Tk) - 1
        furthest = last
        if LEFT:
            furthest = block * SIZE
        _, _, moved, c = _load_numbers(NUMBERS, OFF, BASE, block, furthest, inside, base, PACKED)
        x = _mean_logits(q, slope, ci, MEANS, block, inside, c, od, scale2, D, BD, LEFT, PRECISION)
        x -= reach[:, None] * moved[None, :] + total[:, None]
        size = tl.where(inside, last + 1 - block * SIZE, 0).to(tl.float32)
        weight = tl.exp2(tl.where(x < 60.0, x, 60.0)) * size[None, :]
        weight = tl.where(x == x, weight, 0.0)  # what is not a number must not let anything be dropped
        if PACKED:
            counts = (begins[:, None] <= block[None, :] * SIZE) & (last[None, :] < ends[:, None])
            weight = tl.where(counts, weight, 0.0)
        more += tl.sum(weight, 1)
    return more


@triton.jit
def _drop(dropped, most, spent, budget, q, reach, slope, ci, base, begins, ends, MEANS, NUMBERS, OFF, BASE, blocks, od,
          scale2, SIZE: tl.constexpr, WIDTH: tl.constexpr, LEFT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
          PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """How many of the ``most`` blocks at one end can go, and what share of the budget they have used."""
    some = tl.arange(0, WIDTH)
    going = dropped < most
    while going:
        inside = dropped + some < most
        if LEFT:
            block = dropped + some
            nearest = block * SIZE + SIZE - 1
        else:
            block = blocks - 1 - dropped - some
            nearest = block * SIZE
        radius, spread, moved, c = _load_numbers(NUMBERS, OFF, BASE, block, nearest, inside, base, PACKED)
        x = _mean_logits(q, slope, ci, MEANS, block, inside, c, od, scale2, D, BD, LEFT, PRECISION)
        x += reach[:, None] * moved[None, :] - budget[:, None]
        if PACKED:
            counts = (begins[:, None] <= nearest[None, :]) & (nearest[None, :] < ends[:, None])
            x = tl.where(counts, x, float("-inf"))
        above = tl.max(x + reach[:, None] * radius[None, :], 0) + spread
        share = tl.where(inside, (tl.exp2(tl.max(x, 0)) + tl.exp2(above)) * SIZE, 2.0)
        fit = tl.sum((spent + tl.cumsum(share, 0) < 0.999).to(tl.int32))  # the rest is for rounding
        spent += tl.sum(tl.where(some < fit, share, 0.0))
        dropped += fit
        going = (fit == WIDTH) & (dropped < most)
    return dropped, spent


@triton.jit
def _bounds(Q, K, OFF, BASE, G, MEANS, NUMBERS, LARGE_MEANS, LARGE_NUMBERS, LO, HI, KMASK, DOCS, FIRST, END, sqb, sqh, sqt,
            skb, skh, skt, H, GROUP, Tq, Tk, start, window, scale2, epsilon, D: tl.constexpr, BD: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, LARGE: tl.constexpr, NEAR_KEYS: tl.constexpr, WIDTH: tl.constexpr,
            SLACK_FACTOR: tl.constexpr, CAUSAL: tl.constexpr, GAIN: tl.constexpr, WINDOW: tl.constexpr,
            PADDED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
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
    blocks = tl.cdiv(Tk, BN)
    large = tl.cdiv(Tk, LARGE)
    MEANS += bk * blocks * D
    NUMBERS += bk * blocks * 4
    LARGE_MEANS += bk * large * D
    LARGE_NUMBERS += bk * large * 4
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
    if not (WINDOW or PADDED):
        end = lo // BN
        begin = tl.maximum(end - WIDTH, 0)
        more = _at_least(begin, end, total, q, reach, slope, ci, base, begins, ends, MEANS, NUMBERS, OFF, BASE, Tk, od,
                         scale2, BN, WIDTH, True, D, BD, PACKED, PRECISION)  # fmt: skip
        more += _at_least(0, begin * BN // LARGE, total, q, reach, slope, ci, base, begins, ends, LARGE_MEANS,
                          LARGE_NUMBERS, OFF, BASE, Tk, od, scale2, LARGE, WIDTH, True, D, BD, PACKED, PRECISION)  # fmt: skip
        if not CAUSAL:
            begin = tl.cdiv(hi, BN)
            end = tl.minimum(begin + WIDTH, blocks)
            more += _at_least(begin, end, total, q, reach, slope, ci, base, begins, ends, MEANS, NUMBERS, OFF, BASE, Tk,
                              od, scale2, BN, WIDTH, False, D, BD, PACKED, PRECISION)  # fmt: skip
            more += _at_least(tl.cdiv(end * BN, LARGE), large, total, q, reach, slope, ci, base, begins, ends, LARGE_MEANS,
                              LARGE_NUMBERS, OFF, BASE, Tk, od, scale2, LARGE, WIDTH, False, D, BD, PACKED,
                              PRECISION)  # fmt: skip
        total += tl.log2(1.0 + tl.where(norm > 0.0, more, 0.0))
    budget = tl.where(row, total + tl.log2(epsilon), float("inf"))  # rows that are none need nothing

    where = bh.to(tl.int64) * tl.num_programs(0) + pm
    none = first * 0
    spent = tl.full([], 0.0, tl.float32)
    left, spent = _drop(none, first // LARGE, spent, budget, q, reach, slope, ci, base, begins, ends, LARGE_MEANS,
                        LARGE_NUMBERS, OFF, BASE, large, od, scale2, LARGE, WIDTH, True, D, BD, PACKED, PRECISION)  # fmt: skip
    left, spent = _drop(left * (LARGE // BN), first // BN, spent, budget, q, reach, slope, ci, base, begins, ends,
                        MEANS, NUMBERS, OFF, BASE, blocks, od, scale2, BN, WIDTH, True, D, BD, PACKED, PRECISION)  # fmt: skip
    tl.store(LO + where, left * BN)
    right = none
    if not CAUSAL:
        behind = first + BM
        spent = tl.full([], 0.0, tl.float32)
        right, spent = _drop(none, large - tl.cdiv(behind, LARGE), spent, budget, q, reach, slope, ci, base, begins,
                             ends, LARGE_MEANS, LARGE_NUMBERS, OFF, BASE, large, od, scale2, LARGE, WIDTH, False, D, BD,
                             PACKED, PRECISION)  # fmt: skip
        right = tl.where(right > 0, blocks - (large - right) * (LARGE // BN), 0)
        right, spent = _drop(right, blocks - tl.cdiv(behind, BN), spent, budget, q, reach, slope, ci, base, begins,
                             ends, MEANS, NUMBERS, OFF, BASE, blocks, od, scale2, BN, WIDTH, False, D, BD, PACKED,
                             PRECISION)  # fmt: skip
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
