"""The fused kernels: attention with a potential bias, without a T×T tensor. The forward pass, and what both passes share.

One family serves no bias, ALiBi, FoX, CABLE_NW, CABLE and K-CABLE, causal and bidirectional. What a call does not use is
compiled away. Logits are kept in base 2 (``exp2`` is what the hardware has). No atomics: the same input gives the same
bits.

The potential comes split: ``BASE`` holds it in fp64 at every SPLIT-th key, ``OFF`` in fp32 relative to that. A kernel
subtracts the potential at its own rows from ``BASE`` in fp64, one number for a block of keys, so that ``c_i − c_j`` is exact
to fp32 rounding of the distance at any length. In packs, where the potential restarts, ``OFF`` is the fp64 potential itself
(EXACT).

Causal with κ = identity: ``−g_i c_i`` is constant along a row, so only ``g_i c_j`` is added.

With KERNEL = TOEPLITZ or DENSE there is no potential: OFF is a table of biases in base 2, the same for the whole batch, one
number for each head and distance i − j (from 1 − Tk on), or one for each head, query and key.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from cable_attn.attention import operands

LOG2E = tl.constexpr(operands.LOG2E)
LINEAR = tl.constexpr(operands.LINEAR)
LOG_KERNEL = tl.constexpr(operands.LOG)
TOEPLITZ = tl.constexpr(operands.TOEPLITZ)
DENSE = tl.constexpr(operands.DENSE)
SPLIT = tl.constexpr(operands.SPLIT)
KEY_BLOCK = tl.constexpr(operands.KEY_BLOCK)
BOUND_ROWS = tl.constexpr(operands.BOUND_ROWS)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def split_potential(C, OFF, BASE, scb, sch, sct, H, Tk, BLOCK: tl.constexpr):
    """c = BASE[block] + OFF, the base in fp64 and the offset in fp32."""
    n = tl.program_id(0)
    bh = tl.program_id(1)
    C += (bh // H).to(tl.int64) * scb + (bh % H).to(tl.int64) * sch
    j = n * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(C + n * BLOCK * sct).to(tl.float64)
    c = tl.load(C + j * sct, mask=j < Tk, other=0.0).to(tl.float64)
    tl.store(OFF + bh.to(tl.int64) * Tk + j, (c - base).to(tl.float32), mask=j < Tk)
    tl.store(BASE + bh * tl.num_programs(0) + n, base)


@triton.jit
def _program(BOUNDED: tl.constexpr):
    """Block and head of this program. Pruned heads differ in length, so all heads' longest blocks start first."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    if BOUNDED:
        index = head * tl.num_programs(0) + block
        block = index // tl.num_programs(1)
        head = index % tl.num_programs(1)
    return block, head


@triton.jit
def _potential(OFF, BASE, place, mask, EXACT: tl.constexpr):
    """c at ``place`` in fp64."""
    c = tl.load(OFF + place, mask=mask, other=0.0).to(tl.float64)
    if not EXACT:
        c += tl.load(BASE + place // SPLIT, mask=mask, other=0.0)
    return c


@triton.jit
def _row_base(OFF, BASE, row, start, EXACT: tl.constexpr):
    """The fp64 number that the SPLIT rows around ``row`` take off every potential: that at or just before the first."""
    place = row // SPLIT * SPLIT + start
    if EXACT:
        base = tl.load(OFF + place)
    else:
        base = tl.load(BASE + place // SPLIT)
    return base


@triton.jit
def _from_base(OFF, BASE, n, on, base, Tk, MASKED: tl.constexpr, EXACT: tl.constexpr):
    """c_j − base in fp32 for the keys n + on, which lie within one block of BASE."""
    if MASKED:
        off = tl.load(OFF + n + on, mask=n + on < Tk, other=0.0)
    else:
        off = tl.load(OFF + n + on)
    if EXACT:
        near = (off - base).to(tl.float32)
    else:
        near = off + (tl.load(BASE + n // SPLIT) - base).to(tl.float32)
    return near


@triton.jit
def _visible(at, j, KMASK, DOCS, Tk, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr,
             PACKED: tl.constexpr):  # fmt: skip
    """Which (query at key index ``at``, key ``j``) pairs count; both are 2-D and broadcast."""
    seen = (j < Tk) & (at < Tk)
    if CAUSAL:
        seen = seen & (at >= j)
    if WINDOW:
        seen = seen & (tl.abs(at - j) < window)
    if PADDED:
        seen = seen & (tl.load(KMASK + j, mask=j < Tk, other=0) != 0)
    if PACKED:
        seen = seen & (tl.load(DOCS + j, mask=j < Tk, other=-1) == tl.load(DOCS + at, mask=at < Tk, other=-2))
    return seen


@triton.jit
def _signed(x, at, j, CAUSAL: tl.constexpr):
    """x where the key comes first, −x where it follows: c_i − c_j made a distance."""
    if not CAUSAL:
        x = tl.where(at >= j, x, -x)
    return x


@triton.jit
def _head_table(TABLE, h, Tq, Tk, start, KERNEL: tl.constexpr):
    """One head's table, placed so that ``_table`` can count queries as keys are counted."""
    if KERNEL == TOEPLITZ:
        TABLE += h * (Tq + Tk - 1) + (Tk - 1 - start)
    else:
        TABLE += (h * Tq - start) * Tk
    return TABLE


@triton.jit
def _table(TABLE, at, j, end, Tk, EVEN: tl.constexpr, KERNEL: tl.constexpr):
    """The bias of (query at key index ``at``, key ``j``) pairs; both are 2-D and broadcast. Queries end at ``end``."""
    if KERNEL == TOEPLITZ:
        place = TABLE + (at - j)
    else:
        place = TABLE + (at.to(tl.int64) * Tk + j)
    if EVEN:
        bias = tl.load(place)
    else:
        bias = tl.load(place, mask=(at < end) & (j < Tk), other=0.0)
    return bias


@triton.jit
def _kernel_weight(b, PRECISION: tl.constexpr):
    """1/(1+b²), what K-CABLE's logarithm is in the softmax."""
    y = 1.0 + b * b
    if PRECISION == "ieee" or INTERPRETED:
        inverse = 1.0 / y
    else:  # one instruction, right to a bit or two; a division takes five
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse


@triton.jit
def _forward_step(acc, m, norm, q, g, ci, base, K, V, OFF, BASE, KMASK, DOCS, n, at, on, od, end, Tk, window, skt, svt, scale2,
                  D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr, POTENTIAL: tl.constexpr, KERNEL: tl.constexpr,
                  WINDOW: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
                  SAFE: tl.constexpr, EVEN: tl.constexpr, LATE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One block of keys. With LATE the scale goes into the exponent: ``x`` and ``m`` lack it, and ``g`` is divided by it."""
    j = n + on
    n64 = n * tl.full([], 1, tl.int64)  # the interpreter hands out plain numbers
    kp = K + n64 * skt + on[None, :] * skt + od[:, None]
    vp = V + n64 * svt + on[:, None] * svt + od[None, :]
    if MASKED or BD != D:
        k = tl.load(kp, mask=(j[None, :] < Tk) & (od[:, None] < D), other=0.0)
    else:
        k = tl.load(kp)
    x = tl.dot(q, k, input_precision=PRECISION)
    if not LATE:
        x = x * scale2
    if POTENTIAL:
        cj = _from_base(OFF, BASE, n, on, base, Tk, MASKED, PACKED)
        if CAUSAL and KERNEL == LINEAR:
            x += g[:, None] * cj[None, :]
        elif KERNEL == LINEAR:
            x += _signed(g[:, None] * cj[None, :] - (g * ci)[:, None], at[:, None], j[None, :], CAUSAL)
    if KERNEL >= TOEPLITZ:
        x += _table(OFF, at[:, None], j[None, :], end, Tk, EVEN, KERNEL)
    if MASKED:
        seen = _visible(at[:, None], j[None, :], KMASK, DOCS, Tk, window, CAUSAL, WINDOW, PADDED, PACKED)
        x = tl.where(seen, x, float("-inf"))
    mn = tl.maximum(m, tl.max(x, 1))
    if SAFE:
        top = tl.where(mn == float("-inf"), 0.0, mn)
    else:
        top = mn
    if LATE:
        p = tl.exp2(x * scale2 - (top * scale2)[:, None])
        a = tl.exp2((m - top) * scale2)
    else:
        p = tl.exp2(x - top[:, None])
        a = tl.exp2(m - top)
    if POTENTIAL and KERNEL == LOG_KERNEL:
        p = p * _kernel_weight(g[:, None] * cj[None, :] - (g * ci)[:, None], PRECISION)
    norm = norm * a + tl.sum(p, 1)
    acc = acc * a[:, None]
    if MASKED or BD != D:
        v = tl.load(vp, mask=(j[:, None] < Tk) & (od[None, :] < D), other=0.0)
    else:
        v = tl.load(vp)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, mn, norm


@triton.jit
def forward(Q, K, V, OFF, BASE, G, O, LSE, KMASK, DOCS, LO, HI, sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sob, soh,
            sot, H, GROUP, Tq, Tk, start, window, scale2, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, CAUSAL: tl.constexpr, POTENTIAL: tl.constexpr, GAIN: tl.constexpr, KERNEL: tl.constexpr,
            WINDOW: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr, EVEN: tl.constexpr,
            LATE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One block of BM queries of one head. LSE is in base 2 and holds +inf for a query that sees nothing."""
    pm, bh = _program(BOUNDED)
    pm = tl.num_programs(0) - 1 - pm  # the longest rows first
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    Q += b * sqb + h * sqh
    K += b * skb + (h // GROUP) * skh
    V += b * svb + (h // GROUP) * svh
    O += b * sob + h * soh
    if KERNEL >= TOEPLITZ:
        OFF = _head_table(OFF, h, Tq, Tk, start, KERNEL)
    else:
        OFF += bh.to(tl.int64) * Tk
    BASE += bh * tl.cdiv(Tk, SPLIT)
    KMASK += b * Tk
    DOCS += b * Tk
    i = pm * BM + tl.arange(0, BM)
    on = tl.arange(0, BN)
    od = tl.arange(0, BD)
    at = i + start
    i64 = i.to(tl.int64)
    if EVEN and BD == D:
        q = tl.load(Q + i64[:, None] * sqt + od[None, :])
    else:
        q = tl.load(Q + i64[:, None] * sqt + od[None, :], mask=(i[:, None] < Tq) & (od[None, :] < D), other=0.0)
    first = pm * BM + start  # the key of the first row
    g = tl.full([BM], 1.0, tl.float32)
    ci = tl.zeros([BM], tl.float32)
    base = tl.full([], 0.0, tl.float64)
    if POTENTIAL:
        base = _row_base(OFF, BASE, pm * BM, start, PACKED)
        ci = (_potential(OFF, BASE, at, i < Tq, PACKED) - base).to(tl.float32)
        if GAIN:
            g = tl.load(G + bh.to(tl.int64) * Tq + i, mask=i < Tq, other=0.0)
        if KERNEL == LINEAR:
            g = g * LOG2E
            if LATE:
                g = g / scale2
    m = tl.full([BM], float("-inf"), tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)

    lo, hi, mid = _key_range(
        LO, HI, bh, pm * BM, first, Tq, Tk, window, BM, BN, CAUSAL, WINDOW, PADDED, PACKED, BOUNDED
    )
    ANYWHERE: tl.constexpr = WINDOW or PADDED or PACKED
    if not ANYWHERE:
        for n in range(lo, mid, BN):
            acc, m, norm = _forward_step(acc, m, norm, q, g, ci, base, K, V, OFF, BASE, KMASK, DOCS, n, at, on, od, start + Tq, Tk,
                                      window, skt, svt, scale2, D, BD, CAUSAL, POTENTIAL, KERNEL, WINDOW, PADDED, PACKED, False,
                                      ANYWHERE, EVEN, LATE, PRECISION)  # fmt: skip
    for n in range(mid, hi, BN):
        acc, m, norm = _forward_step(acc, m, norm, q, g, ci, base, K, V, OFF, BASE, KMASK, DOCS, n, at, on, od, start + Tq, Tk,
                                  window, skt, svt, scale2, D, BD, CAUSAL, POTENTIAL, KERNEL, WINDOW, PADDED, PACKED, True,
                                  ANYWHERE, EVEN, LATE, PRECISION)  # fmt: skip
    if LATE:
        m = m * scale2
        g = g * scale2
    if ANYWHERE:
        blind = norm == 0.0
        norm = tl.where(blind, 1.0, norm)
        lse = tl.where(blind, float("inf"), m + tl.log2(norm))
    else:
        lse = m + tl.log2(norm)
    acc = acc / norm[:, None]
    if POTENTIAL and CAUSAL and KERNEL == LINEAR:
        lse -= g * ci
    op = O + i64[:, None] * sot + od[None, :]
    if EVEN and BD == D:
        tl.store(op, acc.to(O.dtype.element_ty))
    else:
        tl.store(op, acc.to(O.dtype.element_ty), mask=(i[:, None] < Tq) & (od[None, :] < D))
    tl.store(LSE + bh.to(tl.int64) * Tq + i, lse, mask=i < Tq)


@triton.jit
def _key_range(LO, HI, bh, row, first, Tq, Tk, window, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
               WINDOW: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr):  # fmt: skip
    """The keys from ``lo`` to ``hi`` count for these rows; those before ``mid`` all do, for every row."""
    lo = first * 0
    hi = first * 0 + Tk
    if CAUSAL:
        hi = tl.minimum(first + BM, Tk)
    if WINDOW:
        lo = tl.maximum(first - window + 1, 0)
        hi = tl.minimum(hi, first + BM - 1 + window)
    if BOUNDED:
        # A tile holds some rows of one pair of bounds, or all of two.
        one = bh.to(tl.int64) * tl.cdiv(Tq, BOUND_ROWS) + row // BOUND_ROWS
        two = bh.to(tl.int64) * tl.cdiv(Tq, BOUND_ROWS) + tl.minimum(row + BM - 1, Tq - 1) // BOUND_ROWS
        lo = tl.maximum(lo, tl.minimum(tl.load(LO + one), tl.load(LO + two)))
        hi = tl.minimum(hi, tl.maximum(tl.load(HI + one), tl.load(HI + two)))
    lo = (lo // BN) * BN
    mid = lo
    if not (WINDOW or PADDED or PACKED):
        if CAUSAL:
            mid = tl.maximum(((first + 1) // BN) * BN, lo)
        else:
            mid = tl.maximum((hi // BN) * BN, lo)
    return lo, hi, mid
