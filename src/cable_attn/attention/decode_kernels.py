"""The kernels of :mod:`cable_attn.attention.decoding`."""

from __future__ import annotations

import triton
import triton.language as tl

from cable_attn.attention.kernels import LOG2E, LOG_KERNEL, _visible


@triton.jit
def _next_step(X, W, BIAS, WG, BIASG, KMASK, PLACE, sct, start, b, h, features, floor, GAIN: tl.constexpr,
               PADDED: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """The potential and the gain of head h of the new token of text b, behind that of the token before at PLACE − sct.

    Everything is loaded before anything is summed: one wait for the memory instead of four.
    """
    bias = tl.load(BIAS + h).to(tl.float32)
    bias_of_gain = tl.full([], 0.0, tl.float32)
    if GAIN:
        bias_of_gain = tl.load(BIASG + h).to(tl.float32)
    step = tl.zeros([BC], tl.float32)
    strength = tl.zeros([BC], tl.float32)
    for first in range(0, features, BC):
        c = first + tl.arange(0, BC)
        x = tl.load(X + b * features + c, mask=c < features, other=0.0).to(tl.float32)
        step += x * tl.load(W + h * features + c, mask=c < features, other=0.0).to(tl.float32)
        if GAIN:
            strength += x * tl.load(WG + h * features + c, mask=c < features, other=0.0).to(tl.float32)
    before = tl.load(PLACE - sct, mask=start > 0, other=0.0)
    real = start >= 0
    if PADDED:
        real = tl.load(KMASK + start) != 0
    added = tl.where(real, tl.maximum(tl.sum(step, 0) + bias, 0.0), 0.0)
    gain = tl.full([], 1.0, tl.float32)
    if GAIN:
        s = tl.sum(strength, 0) + bias_of_gain
        gain = tl.maximum(s, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(s))) + floor
    return before + added.to(before.dtype), gain


@triton.jit
def advance(X, W, BIAS, WG, BIASG, C, START, KMASK, GAINS, scb, sch, sct, heads, features, Tk, floor,
            GAIN: tl.constexpr, PADDED: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """The step, the potential and the gain of one head of one new token."""
    h = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    start = tl.load(START).to(tl.int64)
    place = C + b * scb + h * sch + start * sct
    c, g = _next_step(X, W, BIAS, WG, BIASG, KMASK + b * Tk, place, sct, start, b, h, features, floor, GAIN, PADDED, BC)
    tl.store(place, c)
    if GAIN:
        tl.store(GAINS + b * heads + h, g)


@triton.jit
def _add_block(m, norm, acc, n, q, g, ci, at, row, end, C, K, V, KMASK, DOCS, skt, svt, sct, head, sch, Tk, window, scale2,
               D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr, POTENTIAL: tl.constexpr,
               TOKEN: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """The keys from n on, added to what has been seen.

    With one row each of the BN places keeps a maximum and a sum of its own, so that nothing has to be exchanged between
    threads before the end; with more rows the products go through the tensor cores.
    """
    j = n + tl.arange(0, BN)
    j64 = j.to(tl.int64)
    od = tl.arange(0, BD)
    inside = (j[:, None] < end) & (od[None, :] < D)
    k = tl.load(K + j64[:, None] * skt + od[None, :], mask=inside, other=0.0)
    v = tl.load(V + j64[:, None] * svt + od[None, :], mask=inside, other=0.0)
    if ONE:
        x = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale2
        if POTENTIAL:
            cj = tl.load(C + head * sch + j64 * sct, mask=j < end, other=0.0).to(tl.float64)
            if TOKEN:
                cj = tl.where(j == at, ci, cj)  # what is stored there may not be its own yet
            bias = g * (ci - cj).to(tl.float32)
        seen = _visible(at, j, KMASK, DOCS, Tk, window, True, WINDOW, PADDED, PACKED)
    else:
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        if POTENTIAL:
            there = row[:, None] & (j[None, :] < end)
            cj = tl.load(C + head[:, None] * sch + j64[None, :] * sct, mask=there, other=0.0).to(tl.float64)
            bias = g[:, None] * (ci[:, None] - cj).to(tl.float32)
        seen = row[:, None] & _visible(at[:, None], j[None, :], KMASK, DOCS, Tk, window, True, WINDOW, PADDED, PACKED)
    if POTENTIAL:
        if KERNEL == LOG_KERNEL:
            x -= tl.log2(1.0 + bias * bias)
        else:
            x -= bias * LOG2E
    x = tl.where(seen, x, float("-inf"))
    if ONE:
        top = tl.maximum(m, x)
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(x - safe)
        less = tl.exp2(m - safe)
        norm = norm * less + weight
        acc = acc * less[:, None] + weight[:, None] * v.to(tl.float32)
    else:
        top = tl.maximum(m, tl.max(x, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(x - safe[:, None])
        less = tl.exp2(m - safe)
        norm = norm * less + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * less[:, None], input_precision=PRECISION)
    return top, norm, acc


@triton.jit
def _needed(block, candidates, total, q, g, ci, row, C, MEANS, NUMBERS, head, sch, sct, last, scale2, epsilon,
            D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, ONE: tl.constexpr, PRECISION: tl.constexpr,
            SLACK_FACTOR: tl.constexpr):  # fmt: skip
    """Which blocks may weigh ε/candidates or more for some row; see :mod:`cable_attn.attention.pruning`.

    total: log2 of what Z is at least. Blocks from ``last`` on are near and needed.
    """
    od = tl.arange(0, BD)
    far = block < last
    means = tl.load(
        MEANS + block.to(tl.int64)[:, None] * D + od[None, :], mask=far[:, None] & (od[None, :] < D), other=0.0
    )
    radius = tl.load(NUMBERS + block * 4, mask=far, other=0.0)
    spread = tl.load(NUMBERS + block * 4 + 1, mask=far, other=0.0)
    moved = tl.load(NUMBERS + block * 4 + 2, mask=far, other=0.0)
    nearest = block.to(tl.int64) * BN + BN - 1
    budget = tl.log2(epsilon / (BN * tl.maximum(candidates, 1).to(tl.float32)))
    if ONE:
        reach = tl.sqrt(tl.sum(q * q, 0)) * scale2 * SLACK_FACTOR
        cj = tl.load(C + head * sch + nearest * sct, mask=far, other=0.0).to(tl.float64)
        x = tl.sum(means.to(tl.float32) * q[None, :], 1) * scale2 - g * LOG2E * (ci - cj).to(tl.float32)
        x += reach * moved - total - budget
        share = tl.exp2(x) + tl.exp2(x + reach * radius + spread)
        small = share < 0.999  # what is not a number is not small; the rest is for rounding
    else:
        wide = q.to(tl.float32)
        reach = tl.sqrt(tl.sum(wide * wide, 1)) * scale2 * SLACK_FACTOR
        there = row[:, None] & far[None, :]
        cj = tl.load(C + head[:, None] * sch + nearest[None, :] * sct, mask=there, other=0.0).to(tl.float64)
        x = tl.dot(q, tl.trans(means), input_precision=PRECISION) * scale2
        x -= (g * LOG2E)[:, None] * (ci[:, None] - cj).to(tl.float32)
        x += reach[:, None] * moved[None, :] - (total + budget)[:, None]
        share = tl.exp2(x) + tl.exp2(x + reach[:, None] * radius[None, :] + spread[None, :])
        small = tl.min(((share < 0.999) | ~row[:, None]).to(tl.int32), 0) > 0
    return ~(small & far)


@triton.jit
def part(Q, K, V, C, G, START, KMASK, DOCS, MEANS, NUMBERS, PARTS, TOPS, NORMS, X, W, BIAS, WG, BIASG, sqb, sqh, sqt, skb,
         skh, skt, svb, svh, svt, scb, sch, sct, key_heads, Tq, Tk, blocks, place, window, scale2, epsilon, features, floor,
         TOKEN: tl.constexpr, BC: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
         BN: tl.constexpr, ONE: tl.constexpr, KNOWN: tl.constexpr, POTENTIAL: tl.constexpr, GAIN: tl.constexpr,
         KERNEL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr, PRUNED: tl.constexpr,
         WIDTH: tl.constexpr, SHORT: tl.constexpr, NEAR_KEYS: tl.constexpr, SLACK_FACTOR: tl.constexpr,
         PRECISION: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """All queries that share a key head, over every so-manyth block of its keys.

    Row r is query r % Tq of head r // Tq of the group. TOKEN: with one row, its potential and gain are made here.
    """
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    bk = tl.program_id(1)
    b = (bk // key_heads).to(tl.int64)
    hk = (bk % key_heads).to(tl.int64)
    start = place
    if not KNOWN:
        start = tl.load(START).to(tl.int32)
    od = tl.arange(0, BD)
    K += b * skb + hk * skh
    V += b * svb + hk * svh
    KMASK += b * Tk
    DOCS += b * Tk
    C += b * scb
    MEANS += bk.to(tl.int64) * blocks * D
    NUMBERS += bk.to(tl.int64) * blocks * 4
    if ONE:
        row = start >= 0
        head = hk
        at = start
        q = tl.load(Q + b * sqb + head * sqh + od, mask=od < D, other=0.0).to(tl.float32)
        g = tl.full([], 1.0, tl.float32)
        ci = tl.full([], 0.0, tl.float64)
        if TOKEN:
            stored = C + head * sch + at.to(tl.int64) * sct
            own, g = _next_step(
                X, W, BIAS, WG, BIASG, KMASK, stored, sct, start, b, head, features, floor, GAIN, PADDED, BC
            )
            ci = own.to(tl.float64)
        elif POTENTIAL:
            ci = tl.load(C + head * sch + at * sct).to(tl.float64)
            if GAIN:
                g = tl.load(G + bk)
        m = tl.full([BN], float("-inf"), tl.float32)
        norm = tl.zeros([BN], tl.float32)
        acc = tl.zeros([BN, BD], tl.float32)
    else:
        r = tl.arange(0, BM)
        row = r < GROUP * Tq
        head = hk * GROUP + r // Tq
        i = r % Tq
        at = start + i
        q = tl.load(Q + b * sqb + head[:, None] * sqh + i[:, None] * sqt + od[None, :],
                    mask=row[:, None] & (od[None, :] < D), other=0.0)  # fmt: skip
        g = tl.full([BM], 1.0, tl.float32)
        ci = tl.zeros([BM], tl.float64)
        if POTENTIAL:
            ci = tl.load(C + head * sch + at * sct, mask=row & (at < Tk), other=0.0).to(tl.float64)
            if GAIN:
                g = tl.load(G + (b * key_heads * GROUP + head) * Tq + i, mask=row, other=0.0)
        m = tl.full([BM], float("-inf"), tl.float32)
        norm = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)

    end = tl.minimum(start + Tq, Tk)
    first = end * 0
    if WINDOW:  # what no query sees is not read
        first = tl.maximum(start - window + 1, 0) // BN
    behind = tl.cdiv(end, BN)
    if PRUNED:
        near = tl.maximum(start - NEAR_KEYS + 1, 0) // BN
        short = behind - first <= SHORT * splits  # to judge would take longer than to read
        near_m, near_norm, near_acc = m, norm, acc
        # Z is at least what these weigh: start is seen by every row
        for block in range(tl.where(short, behind, near), start // BN + 1):
            near_m, near_norm, near_acc = _add_block(
                near_m, near_norm, near_acc, block * BN, q, g, ci, at, row, tl.minimum(end, start + 1), C, K, V, KMASK, DOCS,
                skt, svt, sct, head, sch, Tk, window, scale2, D, BD, BN, ONE, POTENTIAL, TOKEN, KERNEL, WINDOW, PADDED, PACKED,
                PRECISION)  # fmt: skip
        if ONE:
            top = tl.max(near_m, 0)
            near_norm = tl.sum(near_norm * tl.exp2(near_m - tl.where(top == float("-inf"), 0.0, top)), 0)
            near_m = top
        total = near_m + tl.log2(near_norm)  # −inf or not a number if a row sees nothing near: then all is needed
        some = tl.arange(0, WIDTH)
        last = tl.where(short, 0, near)
        for group in range(first + split, behind, splits * WIDTH):
            judged = group + some * splits
            needed = _needed(judged, near - first, total, q, g, ci, row, C, MEANS, NUMBERS, head, sch, sct, last, scale2,
                             epsilon, D, BD, BN, ONE, PRECISION, SLACK_FACTOR) & (judged < behind)  # fmt: skip
            bits = tl.sum(needed.to(tl.int32) << some, 0)
            for _ in tl.range(0, tl.sum(needed.to(tl.int32), 0), num_stages=STAGES):
                lowest = bits & -bits
                bits = bits ^ lowest
                one = ((lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127  # its logarithm
                m, norm, acc = _add_block(
                    m, norm, acc, (group + one * splits) * BN, q, g, ci, at, row, end, C, K, V, KMASK, DOCS, skt, svt, sct,
                    head, sch, Tk, window, scale2, D, BD, BN, ONE, POTENTIAL, TOKEN, KERNEL, WINDOW, PADDED, PACKED,
                    PRECISION)  # fmt: skip
    else:
        for block in tl.range(first + split, behind, splits, num_stages=STAGES):
            m, norm, acc = _add_block(
                m, norm, acc, block * BN, q, g, ci, at, row, end, C, K, V, KMASK, DOCS, skt, svt, sct, head, sch, Tk, window,
                scale2, D, BD, BN, ONE, POTENTIAL, TOKEN, KERNEL, WINDOW, PADDED, PACKED, PRECISION)  # fmt: skip

    if ONE:
        top = tl.max(m, 0)
        weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
        where = bk.to(tl.int64) * splits + split
        tl.store(PARTS + where * D + od, tl.sum(acc * weight[:, None], 0), mask=od < D)
        tl.store(TOPS + where, top)
        tl.store(NORMS + where, tl.sum(norm * weight, 0))
        if TOKEN:  # at the end: before the keys it would wait for the memory, and they for it
            tl.store(stored, own, mask=split == 0)
    else:
        r = tl.arange(0, BM)
        where = (bk * splits + split).to(tl.int64) * BM + r
        tl.store(PARTS + where[:, None] * D + od[None, :], acc, mask=row[:, None] & (od[None, :] < D))
        tl.store(TOPS + where, m, mask=row)
        tl.store(NORMS + where, norm, mask=row)


@triton.jit
def together(PARTS, TOPS, NORMS, O, sob, soh, sot, key_heads, Tq, splits, GROUP: tl.constexpr, D: tl.constexpr,
              BD: tl.constexpr, BM: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """One query of one head from its parts; a query that sees nothing gives zeros."""
    bk = tl.program_id(0)
    r = tl.program_id(1)
    head = (bk % key_heads).to(tl.int64) * GROUP + r // Tq
    part = tl.arange(0, SPLITS)
    od = tl.arange(0, BD)
    place = (bk.to(tl.int64) * splits + part) * BM + r
    there = (part[:, None] < splits) & (od[None, :] < D)
    m = tl.load(TOPS + place, mask=part < splits, other=float("-inf"))
    norms = tl.load(NORMS + place, mask=part < splits, other=0.0)
    parts = tl.load(PARTS + place[:, None] * D + od[None, :], mask=there, other=0.0)
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    norm = tl.sum(weight * norms, 0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(norm > 0.0, norm, 1.0)
    where = O + (bk // key_heads).to(tl.int64) * sob + head * soh + (r % Tq) * sot + od
    tl.store(where, out.to(O.dtype.element_ty), mask=od < D)
