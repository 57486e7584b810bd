"""Which keys a block of rows can leave out, with proof.

For a row i the weight of all keys before key n is at most

    n · exp( max_j<n s_ij − g_i (c_i − c_n−1) ) / Z_i

since c is sorted. ``s_ij = q_i·μ + q_i·(k_j − μ) ≤ q_i·μ + ‖q_i‖ · max_j<n ‖k_j − μ‖`` for any vector μ; with the mean key
for μ what all keys share cancels, and the bound is far tighter than ‖q_i‖ ‖k‖. Z_i is at least the sum over the keys near
row i, which is computed exactly. The bound grows with n, so the first live key is found by search, WIDE candidates at a
time, and everything before it may go when the bound is below ε for every row of the block. Bidirectional rows do the same
to the right, with ε/2 each.
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
"""How many keys before (and after) a block of rows count towards its lower bound on Z."""
SAMPLE = 16
"""Any μ will do; the mean of every so many keys is cheaper than that of all."""
WIDE = 32
"""How many places the search looks at in one step."""
SLACK = 1.001
"""For the rounding of norms and products."""


def live_keys(problem: _Problem, document_ids: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The first live key and the end of the live keys for each block of rows: int32 [B, H, blocks]."""
    from cable_attn.attention.fused import BOUND_ROWS

    q, k = problem.q, problem.k
    causal = problem.flags["CAUSAL"]
    mean = k[:, :, ::SAMPLE].mean(dim=2, dtype=torch.float32)  # [B, H_kv, D]
    blocks = triton.cdiv(problem.keys, KEY_BLOCK)
    radius = torch.empty(*k.shape[:2], blocks, device=k.device, dtype=torch.float32)
    _radii[(blocks, k.shape[0] * k.shape[1])](
        k, mean, radius, *k.stride()[:3], k.shape[1], problem.keys, blocks,
        D=problem.flags["D"], BD=problem.flags["BD"], BN=KEY_BLOCK, num_warps=4,
    )  # fmt: skip
    before = radius.cummax(-1).values
    after = before if causal else radius.flip(-1).cummax(-1).values.flip(-1)
    rows = triton.cdiv(problem.queries, BOUND_ROWS)
    lo = torch.empty(problem.batch, problem.heads, rows, device=q.device, dtype=torch.int32)
    hi = torch.empty_like(lo)
    first, end = _documents(document_ids, lo)
    flags = {key: value for key, value in problem.flags.items() if key not in ("KERNEL", "BOUNDED", "POTENTIAL")}
    _bounds[(rows, problem.batch * problem.heads)](
        q, k, *problem.bias, mean, before, after, lo, hi, *problem.masks, first, end,
        *q.stride()[:3], *k.stride()[:3], *problem.sizes, blocks, _largest_step(blocks),
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


def _largest_step(blocks: int) -> int:
    step = 1
    while step * WIDE < blocks:
        step *= WIDE
    return step


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
def _radii(K, MEAN, R, skb, skh, skt, key_heads, Tk, blocks, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """The largest distance of a key from the mean key, for each block of keys."""
    n = tl.program_id(0)
    bk = tl.program_id(1)
    j = n * BN + tl.arange(0, BN)
    od = tl.arange(0, BD)
    base = K + (bk // key_heads).to(tl.int64) * skb + (bk % key_heads).to(tl.int64) * skh
    mask = (j[:, None] < Tk) & (od[None, :] < D)
    k = tl.load(base + j.to(tl.int64)[:, None] * skt + od[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(MEAN + bk * D + od, mask=od < D, other=0.0)
    away = tl.where(mask, k - mean[None, :], 0.0)
    tl.store(R + bk.to(tl.int64) * blocks + n, tl.sqrt(tl.max(tl.sum(away * away, 1))))


@triton.jit
def _bounds(Q, K, OFF, BASE, G, MEAN, BEFORE, AFTER, LO, HI, KMASK, DOCS, FIRST, END, sqb, sqh, sqt, skb, skh, skt, H, GROUP, Tq, Tk, start, window, blocks, step, scale2, epsilon, D: tl.constexpr,
            BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, NEAR_KEYS: tl.constexpr, WIDTH: tl.constexpr, SLACK_FACTOR: tl.constexpr,
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
    BEFORE += bk * blocks
    AFTER += bk * blocks
    i = pm * BM + tl.arange(0, BM)
    on = tl.arange(0, BN)
    od = tl.arange(0, BD)
    at = i + start
    row = i < Tq
    q = tl.load(Q + b * sqb + h * sqh + i.to(tl.int64)[:, None] * sqt + od[None, :],
                mask=row[:, None] & (od[None, :] < D), other=0.0)  # fmt: skip
    g = tl.full([BM], 1.0, tl.float32)
    if GAIN:
        g = tl.load(G + bh.to(tl.int64) * Tq + i, mask=row, other=0.0)
    base = _potential(OFF, BASE, pm * BM + start, True, PACKED)
    ci = (_potential(OFF, BASE, at, row, PACKED) - base).to(tl.float32)
    mean = tl.load(MEAN + bk * D + od, mask=od < D, other=0.0)
    wide = q.to(tl.float32)
    shared = tl.sum(wide * mean[None, :], 1) * scale2  # q_i·μ
    reach = tl.sqrt(tl.sum(wide * wide, 1)) * tl.abs(scale2) * SLACK_FACTOR

    first = pm * BM + start
    m = tl.full([BM], float("-inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    lo = tl.maximum((first - NEAR_KEYS) // BN * BN, 0)
    hi = tl.minimum(first + BM, Tk)
    if not CAUSAL:
        hi = tl.minimum(hi + NEAR_KEYS, Tk)
    for n in range(lo, hi, BN):
        j = n + on
        k = tl.load(K + n * tl.full([], 1, tl.int64) * skt + on[None, :] * skt + od[:, None],
                    mask=(j[None, :] < Tk) & (od[:, None] < D), other=0.0)  # fmt: skip
        cj = _from_base(OFF, BASE, n, on, base, Tk, True, PACKED)
        x = tl.dot(q, k, input_precision=PRECISION) * scale2
        x -= (g * LOG2E)[:, None] * _signed(ci[:, None] - cj[None, :], at[:, None], j[None, :], CAUSAL)
        seen = _visible(at[:, None], j[None, :], KMASK, DOCS, Tk, window, CAUSAL, WINDOW, PADDED, PACKED)
        x = tl.where(seen, x, float("-inf"))
        top = tl.maximum(m, tl.max(x, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        norm = norm * tl.exp2(m - safe) + tl.sum(tl.exp2(x - safe[:, None]), 1)
        m = top
    # log2 of ε Z, and of what one far key weighs before its distance counts; a row with no near key prunes nothing.
    budget = tl.where(norm > 0.0, m + tl.log2(tl.where(norm > 0.0, norm, 1.0)), float("-inf")) + tl.log2(epsilon)
    slope = g * LOG2E
    begins = tl.zeros([BM], tl.int32)
    ends = tl.zeros([BM], tl.int32) + Tk
    if PACKED:
        begins = tl.load(FIRST + b * Tk + at, mask=row, other=0)
        ends = tl.load(END + b * Tk + at, mask=row, other=0)

    # How many blocks of keys may go on the left, and on the right: digits to base WIDTH, the highest first.
    where = bh.to(tl.int64) * tl.num_programs(0) + pm
    digit = tl.arange(0, WIDTH)
    left = first * 0
    right = first * 0
    while step > 0:
        block = left + step * (1 + digit)
        last = block * BN - 1
        inside = block <= first // BN
        c_last = (_potential(OFF, BASE, last, inside, PACKED) - base).to(tl.float32)
        radius = tl.load(BEFORE + block - 1, mask=inside, other=0.0)
        count = tl.log2((last + 1).to(tl.float32))
        weight = (shared - slope * ci)[:, None] + reach[:, None] * radius[None, :] + slope[:, None] * c_last[None, :]
        needed = row[:, None] & (begins[:, None] <= last[None, :]) & (weight + count[None, :] >= budget[:, None])
        fits = inside & (tl.max(needed.to(tl.int32), 0) == 0)
        left += step * tl.min(tl.where(fits, WIDTH, digit))
        if not CAUSAL:
            block = blocks - right - step * (1 + digit)
            inside = block * BN >= first + BM
            c_next = (_potential(OFF, BASE, block * BN, inside, PACKED) - base).to(tl.float32)
            radius = tl.load(AFTER + block, mask=inside, other=0.0)
            count = tl.log2(tl.maximum(Tk - block * BN, 1).to(tl.float32))
            weight = (
                (shared + slope * ci)[:, None] + reach[:, None] * radius[None, :] - slope[:, None] * c_next[None, :]
            )
            needed = row[:, None] & (ends[:, None] > block[None, :] * BN) & (weight + count[None, :] >= budget[:, None])
            fits = inside & (tl.max(needed.to(tl.int32), 0) == 0)
            right += step * tl.min(tl.where(fits, WIDTH, digit))
        step = step // WIDTH
    tl.store(LO + where, left * BN)
    tl.store(HI + where, tl.where(right > 0, (blocks - right) * BN, Tk))
