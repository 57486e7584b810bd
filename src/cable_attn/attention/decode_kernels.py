"""The kernels of :mod:`cable_attn.attention.decoding`."""

from __future__ import annotations

import triton
import triton.language as tl

from cable_attn.attention.kernels import LOG2E, LOG_KERNEL, _visible


@triton.jit
def part(Q, K, V, C, G, START, KMASK, DOCS, PARTS, TOPS, NORMS, sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, scb, sch, sct,
          key_heads, Tq, Tk, window, scale2, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr, POTENTIAL: tl.constexpr, GAIN: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr,
          PADDED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """All queries that share a key head, over one part of its keys. Row r is query r % Tq of head r // Tq of the group."""
    part = tl.program_id(0)
    bk = tl.program_id(1)
    b = (bk // key_heads).to(tl.int64)
    hk = (bk % key_heads).to(tl.int64)
    r = tl.arange(0, BM)
    row = r < GROUP * Tq
    head = hk * GROUP + r // Tq
    i = r % Tq
    start = tl.load(START).to(tl.int32)
    at = start + i
    on = tl.arange(0, BN)
    od = tl.arange(0, BD)
    q = tl.load(Q + b * sqb + head[:, None] * sqh + i[:, None] * sqt + od[None, :],
                mask=row[:, None] & (od[None, :] < D), other=0.0)  # fmt: skip
    K += b * skb + hk * skh
    V += b * svb + hk * svh
    KMASK += b * Tk
    DOCS += b * Tk
    C += b * scb
    g = tl.full([BM], 1.0, tl.float32)
    ci = tl.zeros([BM], tl.float64)
    if POTENTIAL:
        ci = tl.load(C + head * sch + at * sct, mask=row & (at < Tk), other=0.0).to(tl.float64)
        if GAIN:
            g = tl.load(G + (b * key_heads * GROUP + head) * Tq + i, mask=row, other=0.0)

    end = tl.minimum(start + Tq, Tk)
    size = tl.cdiv(tl.cdiv(end, BN), tl.num_programs(0)) * BN
    lo = part * size
    if WINDOW:  # what no query sees is not read
        lo = tl.maximum(lo, tl.maximum(start - window + 1, 0) // BN * BN)
    hi = tl.minimum(part * size + size, end)
    m = tl.full([BM], float("-inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    for n in range(lo, hi, BN):
        j = n + on
        j64 = j.to(tl.int64)
        k = tl.load(K + j64[None, :] * skt + od[:, None], mask=(j[None, :] < end) & (od[:, None] < D), other=0.0)
        x = tl.dot(q, k, input_precision=PRECISION) * scale2
        if POTENTIAL:
            there = row[:, None] & (j[None, :] < end)
            cj = tl.load(C + head[:, None] * sch + j64[None, :] * sct, mask=there, other=0.0).to(tl.float64)
            bias = g[:, None] * (ci[:, None] - cj).to(tl.float32)
            if KERNEL == LOG_KERNEL:
                x -= tl.log2(1.0 + bias * bias)
            else:
                x -= bias * LOG2E
        seen = row[:, None] & _visible(at[:, None], j[None, :], KMASK, DOCS, Tk, window, True, WINDOW, PADDED, PACKED)
        x = tl.where(seen, x, float("-inf"))
        top = tl.maximum(m, tl.max(x, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(x - safe[:, None])
        less = tl.exp2(m - safe)
        norm = norm * less + tl.sum(weight, 1)
        v = tl.load(V + j64[:, None] * svt + od[None, :], mask=(j[:, None] < end) & (od[None, :] < D), other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * less[:, None], input_precision=PRECISION)
        m = top
    place = (bk * tl.num_programs(0) + part).to(tl.int64) * BM + r
    tl.store(PARTS + place[:, None] * D + od[None, :], acc, mask=row[:, None] & (od[None, :] < D))
    tl.store(TOPS + place, m, mask=row)
    tl.store(NORMS + place, norm, mask=row)


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
    m = tl.load(TOPS + place, mask=part < splits, other=float("-inf"))
    top = tl.max(m, 0)
    weight = tl.exp2(m - tl.where(top == float("-inf"), 0.0, top))
    norm = tl.sum(weight * tl.load(NORMS + place, mask=part < splits, other=0.0), 0)
    there = (part[:, None] < splits) & (od[None, :] < D)
    parts = tl.load(PARTS + place[:, None] * D + od[None, :], mask=there, other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(norm > 0.0, norm, 1.0)
    where = O + (bk // key_heads).to(tl.int64) * sob + head * soh + (r % Tq) * sot + od
    tl.store(where, out.to(O.dtype.element_ty), mask=od < D)
