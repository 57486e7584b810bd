"""The backward pass of the fused kernels: gradients for q, k, v, the potential, the gain, and tables of biases.

The tensor cores do much of the bias's work. Numbers of a row are cut into three pieces of the low precision, 24
bits together, and kept as COLUMNS columns: (g1 g2 g1 g3 g2 g1) for a query, (c1 c1 c2 c1 c2 c3 1) for a key. With SUMS a
product with these columns gives the gradients of c and g, and takes δ off; with FOLD (causal, κ = identity) another one
adds the bias to the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cable_attn.attention import operands
from cable_attn.attention.kernels import (
    KEY_BLOCK,
    LINEAR,
    LOG2E,
    LOG_KERNEL,
    SPLIT,
    TOEPLITZ,
    _from_base,
    _head_table,
    _kernel_weight,
    _key_range,
    _potential,
    _program,
    _row_base,
    _signed,
    _table,
    _visible,
)

COLUMNS = tl.constexpr(operands.COLUMNS)


@triton.jit
def potential_columns(OFF, COLS, count, BLOCK: tl.constexpr):
    """The columns of all keys."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    off = tl.load(OFF + j, mask=j < count, other=0.0)
    place = j[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(COLS + place, _potential_columns(off, COLS.dtype.element_ty), mask=j[:, None] < count)


@triton.jit
def _pieces(x, TYPE: tl.constexpr):
    """x as the sum of three numbers of a lower precision."""
    first = x.to(TYPE)
    rest = x - first.to(tl.float32)
    second = rest.to(TYPE)
    return first, second, (rest - second.to(tl.float32)).to(TYPE)


@triton.jit
def _potential_columns(c, TYPE: tl.constexpr):
    """(c1 c1 c2 c1 c2 c3 1 0 …): the keys' side of the product, and a one for sums over keys."""
    first, second, third = _pieces(c, TYPE)
    column = tl.arange(0, COLUMNS)[None, :]
    low = tl.where(column == 5, third[:, None], tl.where(column == 6, 1.0, 0.0).to(TYPE))
    low = tl.where((column == 2) | (column == 4), second[:, None], low)
    return tl.where((column == 0) | (column == 1) | (column == 3), first[:, None], low)


@triton.jit
def _gain_columns(g, TYPE: tl.constexpr):
    """(g1 g2 g1 g3 g2 g1 0 …): the queries' side."""
    first, second, third = _pieces(g, TYPE)
    column = tl.arange(0, COLUMNS)[None, :]
    low = tl.where(column == 3, third[:, None], tl.zeros([1, COLUMNS], TYPE))
    low = tl.where((column == 1) | (column == 4), second[:, None], low)
    return tl.where((column == 0) | (column == 2) | (column == 5), first[:, None], low)


@triton.jit
def _delta_columns(delta, TYPE: tl.constexpr):
    """(0 … −δ1 −δ2 −δ3 …) in columns 8 to 10 of the queries' side."""
    first, second, third = _pieces(-delta, TYPE)
    column = tl.arange(0, COLUMNS)[None, :]
    low = tl.where(column == 10, third[:, None], tl.zeros([1, COLUMNS], TYPE))
    return tl.where(column == 8, first[:, None], tl.where(column == 9, second[:, None], low))


@triton.jit
def _load_columns(COLS, n, on, Tk, MASKED: tl.constexpr):
    """The columns of the keys n + on, [COLUMNS, keys]."""
    place = COLS + n * tl.full([], COLUMNS, tl.int64) + on[None, :] * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    if MASKED:
        columns = tl.load(place, mask=n + on[None, :] < Tk, other=0.0)
    else:
        columns = tl.load(place)
    return columns


@triton.jit
def row_dots(O, DO, LSE, OFF, BASE, G, DELTA, SHIFT, OWN, ROWS, sob, soh, sot, sdob, sdoh, sdot, H, Tq, Tk, start, scale,
             D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, CAUSAL: tl.constexpr, POTENTIAL: tl.constexpr,
             GAIN: tl.constexpr, KERNEL: tl.constexpr, PACKED: tl.constexpr, SUMS: tl.constexpr):  # fmt: skip
    """What a whole row shares in the backward pass.

    DELTA: o_i · do_i. OWN: g_i c_i from the base of its rows. SHIFT: what is taken off the logits,
    in the causal form with the row's own part of the bias. ROWS: with SUMS, the columns of g and −δ.
    """
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    i64 = i.to(tl.int64)
    od = tl.arange(0, BD)
    mask = (i[:, None] < Tq) & (od[None, :] < D)
    o = tl.load(O + b * sob + h * soh + i64[:, None] * sot + od[None, :], mask=mask, other=0.0).to(tl.float32)
    do = tl.load(DO + b * sdob + h * sdoh + i64[:, None] * sdot + od[None, :], mask=mask, other=0.0).to(tl.float32)
    line = bh.to(tl.int64) * Tq + i
    delta = tl.sum(o * do, 1)
    tl.store(DELTA + line, delta, mask=i < Tq)
    if POTENTIAL:
        OFF += bh.to(tl.int64) * Tk
        BASE += bh * tl.cdiv(Tk, SPLIT)
        base = _row_base(OFF, BASE, tl.program_id(0) * BM, start, PACKED)
        ci = (_potential(OFF, BASE, i + start, i < Tq, PACKED) - base).to(tl.float32)
        g = tl.full([BM], 1.0, tl.float32)
        if GAIN:
            g = tl.load(G + line, mask=i < Tq, other=0.0)
        tl.store(OWN + line, g * ci, mask=i < Tq)
        if CAUSAL and KERNEL == LINEAR:
            lse = tl.load(LSE + line, mask=i < Tq, other=0.0)
            tl.store(SHIFT + line, lse + g * LOG2E * ci, mask=i < Tq)
        if SUMS:
            TYPE: tl.constexpr = ROWS.dtype.element_ty
            place = line[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
            both = _gain_columns(g / scale, TYPE) + _delta_columns(delta, TYPE)
            tl.store(ROWS + place, both, mask=i[:, None] < Tq)


@triton.jit
def _keys_step(dk, dv, dc, k, v, off, key_base, columns, ones, j, Q, DO, OFF, BASE, G, SHIFT, DELTA, OWN, ROWS, KMASK, DOCS, m0, om, od, Tq,
               Tk, start, window, sqt, sdot, scale2, D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
               POTENTIAL: tl.constexpr, GAIN: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr,
               PADDED: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, NEED_C: tl.constexpr,
               FOLD: tl.constexpr, SUMS: tl.constexpr, LATE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One block of queries against this program's keys; tiles are [keys, queries]."""
    i = m0 + om
    m64 = m0 * tl.full([], 1, tl.int64)
    qp = Q + m64 * sqt + om[None, :] * sqt + od[:, None]
    dop = DO + m64 * sdot + om[:, None] * sdot + od[None, :]
    if EVEN and BD == D:
        qT = tl.load(qp)
        do = tl.load(dop)
    else:
        qT = tl.load(qp, mask=(i[None, :] < Tq) & (od[:, None] < D), other=0.0)
        do = tl.load(dop, mask=(i[:, None] < Tq) & (od[None, :] < D), other=0.0)
    if EVEN:
        shift = tl.load(SHIFT + i)
    else:
        shift = tl.load(SHIFT + i, mask=i < Tq, other=float("inf"))
    at = i + start
    x = tl.dot(k, qT, input_precision=PRECISION)
    g = tl.full(i.shape, 1.0, tl.float32)
    if POTENTIAL and GAIN:
        if EVEN:
            g = tl.load(G + i)
        else:
            g = tl.load(G + i, mask=i < Tq, other=0.0)
    if SUMS:
        rows = _load_columns(ROWS, m0, om, Tq, not EVEN)
    if FOLD:
        x = tl.dot(columns, rows, x, input_precision=PRECISION)
        apart = (key_base - _row_base(OFF, BASE, m0, start, PACKED)).to(tl.float32) * LOG2E
        x = x * scale2 + (g * apart - shift)[None, :]
    elif POTENTIAL:
        base = _row_base(OFF, BASE, m0, start, PACKED)
        if PACKED:
            cj = (off - base).to(tl.float32)
        else:
            cj = off + (key_base - base).to(tl.float32)
        if CAUSAL and KERNEL == LINEAR:
            x = x * scale2 + (g[None, :] * (cj * LOG2E)[:, None] - shift[None, :])
        else:
            if EVEN:
                own = tl.load(OWN + i)
            else:
                own = tl.load(OWN + i, mask=i < Tq, other=0.0)
            bias = g[None, :] * cj[:, None] - own[None, :]
            x = x * scale2 - shift[None, :]
            if KERNEL == LINEAR:
                x += _signed(bias, at[None, :], j[:, None], CAUSAL) * LOG2E
    else:
        x = x * scale2 - shift[None, :]
    if KERNEL >= TOEPLITZ:
        x += _table(OFF, at[None, :], j[:, None], start + Tq, Tk, EVEN, KERNEL)
    p = tl.exp2(x)
    if POTENTIAL and KERNEL == LOG_KERNEL:
        inverse = _kernel_weight(bias, PRECISION)
        p = p * inverse
        slope = bias * inverse
    if MASKED:
        seen = _visible(at[None, :], j[:, None], KMASK, DOCS, Tk, window, CAUSAL, WINDOW, PADDED, PACKED)
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if SUMS:
        dp = tl.dot(ones, rows, dp, input_precision=PRECISION)
    else:
        if EVEN:
            delta = tl.load(DELTA + i)
        else:
            delta = tl.load(DELTA + i, mask=i < Tq, other=0.0)
        dp -= delta[None, :]
    ds = p * dp
    if NEED_C:
        w = ds
        if KERNEL == LOG_KERNEL:
            w = w * slope
        else:
            w = _signed(w, at[None, :], j[:, None], CAUSAL)
        if SUMS:
            dc = tl.dot(w.to(qT.dtype), tl.trans(rows), dc, input_precision=PRECISION)
        elif LATE:
            dc += w * g[None, :]
        else:
            dc += tl.sum(w * g[None, :], 1)
    dk = tl.dot(ds.to(qT.dtype), tl.trans(qT), dk, input_precision=PRECISION)
    return dk, dv, dc


@triton.jit
def backward_keys(Q, K, V, OFF, BASE, G, COLS, DO, SHIFT, DELTA, OWN, ROWS, DK, DV, DC, KMASK, DOCS, BEGIN, END, sgb, sgh, sgt, sqb, sqh, sqt, skb,
                  skh, skt, svb, svh, svt, sdob, sdoh, sdot, H, GROUP: tl.constexpr, Tq, Tk, start, window, scale, scale2,
                  D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
                  POTENTIAL: tl.constexpr, GAIN: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr,
                  PADDED: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr, NEED_C: tl.constexpr,
                  FOLD: tl.constexpr, SUMS: tl.constexpr, LATE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dk, dv and the keys' part of dc for one block of BN keys, over all queries of all heads that share them.

    sgb, sgh, sgt: strides of dk and of dv.
    """
    pn, bk = _program(BOUNDED)
    n0 = pn * BN
    key_heads = H // GROUP
    b = (bk // key_heads).to(tl.int64)
    hk = (bk % key_heads).to(tl.int64)
    j = n0 + tl.arange(0, BN)
    j64 = j.to(tl.int64)
    od = tl.arange(0, BD)
    om = tl.arange(0, BM)
    mask = (j[:, None] < Tk) & (od[None, :] < D)
    k = tl.load(K + b * skb + hk * skh + j64[:, None] * skt + od[None, :], mask=mask, other=0.0)
    v = tl.load(V + b * svb + hk * svh + j64[:, None] * svt + od[None, :], mask=mask, other=0.0)
    KMASK += b * Tk
    DOCS += b * Tk
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    # Rows from `lo` on see some of these keys, rows from `mid` on all of them.
    lo = n0 * 0
    mid = n0 * 0
    hi = n0 * 0 + Tq
    if CAUSAL:
        lo = (tl.maximum(n0 - start, 0) // BM) * BM
        mid = tl.minimum(tl.cdiv(tl.maximum(n0 + BN - 1 - start, 0), BM) * BM, Tq)
    if WINDOW:
        hi = tl.minimum(hi, tl.maximum(n0 + BN - 1 + window - start, 0))
        lo = tl.maximum(lo, (tl.maximum(n0 - window + 1 - start, 0) // BM) * BM)
    if WINDOW or PADDED or PACKED or (not CAUSAL and not EVEN):
        mid = hi
    bounds = tl.cdiv(Tk, KEY_BLOCK)
    for r in range(GROUP):
        h = hk * GROUP + r
        bh = b * H + h
        q_head = Q + b * sqb + h * sqh
        do_head = DO + b * sdob + h * sdoh
        off_head = OFF + bh * Tk
        if KERNEL >= TOEPLITZ:
            off_head = _head_table(OFF, h, Tq, Tk, start, KERNEL)
        base_head = BASE + bh * tl.cdiv(Tk, SPLIT)
        g_head = G + bh * Tq
        shift_head = SHIFT + bh * Tq
        delta_head = DELTA + bh * Tq
        own_head = OWN + bh * Tq
        rows_head = ROWS + bh * Tq * COLUMNS
        off = tl.zeros([BN], tl.float32)
        key_base = tl.full([], 0.0, tl.float64)
        if POTENTIAL:
            off = tl.load(off_head + j, mask=j < Tk, other=0.0)
            if not PACKED:
                key_base = tl.load(base_head + n0 // SPLIT)
        columns = k
        ones = k
        if SUMS:
            dc = tl.zeros([BN, COLUMNS], tl.float32)
            column = tl.arange(0, COLUMNS)[None, :]
            columns = tl.where(column < 6, _potential_columns(off, k.dtype), tl.zeros([1, COLUMNS], k.dtype))
            ones = tl.where((column >= 8) & (column <= 10) & (j[:, None] >= 0), 1.0, 0.0).to(k.dtype)
        elif LATE:
            dc = tl.zeros([BN, BM], tl.float32)
        else:
            dc = tl.zeros([BN], tl.float32)
        begin = lo
        end = hi
        if BOUNDED:
            # A tile holds one or two blocks of KEY_BLOCK; a block that no row needs says from Tq to 0.
            one = bh * bounds + n0 // KEY_BLOCK
            two = bh * bounds + tl.minimum(n0 + BN - 1, Tk - 1) // KEY_BLOCK
            begin = tl.maximum(lo, (tl.minimum(tl.load(BEGIN + one), tl.load(BEGIN + two)) // BM) * BM)
            end = tl.minimum(hi, tl.maximum(tl.load(END + one), tl.load(END + two)))
        # A branch around the products would have the compiler run them one at a time.
        for m0 in range(begin, tl.minimum(mid, end), BM):
            dk, dv, dc = _keys_step(dk, dv, dc, k, v, off, key_base, columns, ones, j, q_head, do_head, off_head, base_head,
                                    g_head, shift_head, delta_head, own_head, rows_head, KMASK, DOCS, m0, om, od, Tq, Tk,
                                    start, window, sqt, sdot, scale2, D, BD, CAUSAL, POTENTIAL, GAIN, KERNEL, WINDOW,
                                    PADDED, PACKED, True, NEED_C, FOLD, SUMS, LATE, EVEN, PRECISION)  # fmt: skip
        for m0 in range(tl.maximum(begin, mid), end, BM):
            dk, dv, dc = _keys_step(dk, dv, dc, k, v, off, key_base, columns, ones, j, q_head, do_head, off_head, base_head,
                                    g_head, shift_head, delta_head, own_head, rows_head, KMASK, DOCS, m0, om, od, Tq, Tk,
                                    start, window, sqt, sdot, scale2, D, BD, CAUSAL, POTENTIAL, GAIN, KERNEL, WINDOW,
                                    PADDED, PACKED, False, NEED_C, FOLD, SUMS, LATE, EVEN, PRECISION)  # fmt: skip
        if NEED_C:
            if SUMS:
                column = tl.arange(0, COLUMNS)[None, :]
                dc = tl.sum(tl.where((column == 0) | (column == 1) | (column == 3), dc, 0.0), 1) * scale
            elif LATE:
                dc = tl.sum(dc, 1)
            if KERNEL == LOG_KERNEL:
                dc = dc * -2.0
            tl.store(DC + bh * Tk + j, dc, mask=j < Tk)
    rows = b * sgb + hk * sgh + j64[:, None] * sgt + od[None, :]
    tl.store(DK + rows, (dk * scale).to(DK.dtype.element_ty), mask=mask)
    tl.store(DV + rows, dv.to(DV.dtype.element_ty), mask=mask)


@triton.jit
def _queries_step(dq, dg, rows, q, do, g, ci, shift, delta, base, columns, K, V, OFF, BASE, COLS, KMASK, DOCS, n, at, on, od, end, Tk,
                  window, skt, svt, scale2, D: tl.constexpr, BD: tl.constexpr, CAUSAL: tl.constexpr,
                  POTENTIAL: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr,
                  PACKED: tl.constexpr, MASKED: tl.constexpr, NEED_C: tl.constexpr,
                  FOLD: tl.constexpr, SUMS: tl.constexpr, LATE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    j = n + on
    n64 = n * tl.full([], 1, tl.int64)
    kp = K + n64 * skt + on[None, :] * skt + od[:, None]
    vp = V + n64 * svt + on[None, :] * svt + od[:, None]
    if MASKED or BD != D:
        kT = tl.load(kp, mask=(j[None, :] < Tk) & (od[:, None] < D), other=0.0)
        vT = tl.load(vp, mask=(j[None, :] < Tk) & (od[:, None] < D), other=0.0)
    else:
        kT = tl.load(kp)
        vT = tl.load(vp)
    x = tl.dot(q, kT, input_precision=PRECISION)
    if SUMS:
        keys = _load_columns(COLS, n, on, Tk, MASKED)
        apart = (tl.load(BASE + n // SPLIT) - base).to(tl.float32)
    if FOLD:
        x = tl.dot(columns, keys, x, input_precision=PRECISION)
        x = x * scale2 + (g * LOG2E * apart - shift)[:, None]
    elif POTENTIAL:
        cj = _from_base(OFF, BASE, n, on, base, Tk, MASKED, PACKED)
        if CAUSAL and KERNEL == LINEAR:
            x = x * scale2 + ((g * LOG2E)[:, None] * cj[None, :] - shift[:, None])
        else:
            bias = g[:, None] * cj[None, :] - (g * ci)[:, None]
            x = x * scale2 - shift[:, None]
            if KERNEL == LINEAR:
                x += _signed(bias, at[:, None], j[None, :], CAUSAL) * LOG2E
    else:
        x = x * scale2 - shift[:, None]
    if KERNEL >= TOEPLITZ:
        x += _table(OFF, at[:, None], j[None, :], end, Tk, EVEN, KERNEL)
    p = tl.exp2(x)
    if POTENTIAL and KERNEL == LOG_KERNEL:
        inverse = _kernel_weight(bias, PRECISION)
        p = p * inverse
        slope = bias * inverse
    if MASKED:
        seen = _visible(at[:, None], j[None, :], KMASK, DOCS, Tk, window, CAUSAL, WINDOW, PADDED, PACKED)
        p = tl.where(seen, p, 0.0)
    ds = p * (tl.dot(do, vT, input_precision=PRECISION) - delta[:, None])
    if NEED_C:
        w = ds
        if KERNEL == LOG_KERNEL:
            w = w * slope
        else:
            w = _signed(w, at[:, None], j[None, :], CAUSAL)
        if SUMS:
            sums = tl.dot(w.to(kT.dtype), tl.trans(keys), input_precision=PRECISION)
            dg += sums * apart
            rows += sums
        elif LATE:
            dg += w * cj[None, :]
            rows += w
        else:
            dg += tl.sum(w * cj[None, :], 1)
            rows += tl.sum(w, 1)
    dq = tl.dot(ds.to(kT.dtype), tl.trans(kT), dq, input_precision=PRECISION)
    return dq, dg, rows


@triton.jit
def backward_queries(Q, K, V, OFF, BASE, G, COLS, DO, SHIFT, DELTA, OWN, ROWS, DQ, DG, DC, KMASK, DOCS, LO, HI, sgb, sgh, sgt, sqb, sqh, sqt, skb,
                     skh, skt, svb, svh, svt, sdob, sdoh, sdot, H, GROUP: tl.constexpr, Tq, Tk, start, window, scale, scale2,
                     D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
                     POTENTIAL: tl.constexpr, GAIN: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr,
                     PADDED: tl.constexpr, PACKED: tl.constexpr, BOUNDED: tl.constexpr, NEED_C: tl.constexpr,
                     FOLD: tl.constexpr, SUMS: tl.constexpr, LATE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """dq, dg and the rows' part of dc (taken off what ``backward_keys`` stored) for one block of BM queries."""
    pm, bh = _program(BOUNDED)
    pm = tl.num_programs(0) - 1 - pm
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    K += b * skb + (h // GROUP) * skh
    V += b * svb + (h // GROUP) * svh
    if KERNEL >= TOEPLITZ:
        OFF = _head_table(OFF, h, Tq, Tk, start, KERNEL)
    else:
        OFF += bh.to(tl.int64) * Tk
    BASE += bh * tl.cdiv(Tk, SPLIT)
    KMASK += b * Tk
    DOCS += b * Tk
    i = pm * BM + tl.arange(0, BM)
    i64 = i.to(tl.int64)
    on = tl.arange(0, BN)
    od = tl.arange(0, BD)
    at = i + start
    line = bh.to(tl.int64) * Tq
    mask = (i[:, None] < Tq) & (od[None, :] < D)
    q = tl.load(Q + b * sqb + h * sqh + i64[:, None] * sqt + od[None, :], mask=mask, other=0.0)
    do = tl.load(DO + b * sdob + h * sdoh + i64[:, None] * sdot + od[None, :], mask=mask, other=0.0)
    shift = tl.load(SHIFT + line + i, mask=i < Tq, other=float("inf"))
    delta = tl.load(DELTA + line + i, mask=i < Tq, other=0.0)
    g = tl.full([BM], 1.0, tl.float32)
    ci = tl.zeros([BM], tl.float32)
    base = tl.full([], 0.0, tl.float64)
    if POTENTIAL:
        if GAIN:
            g = tl.load(G + line + i, mask=i < Tq, other=0.0)
        base = _row_base(OFF, BASE, pm * BM, start, PACKED)
        ci = (_potential(OFF, BASE, at, i < Tq, PACKED) - base).to(tl.float32)
    dq = tl.zeros([BM, BD], tl.float32)
    columns = q
    if SUMS:
        columns = _gain_columns(g / scale, q.dtype)
        COLS += bh.to(tl.int64) * Tk * COLUMNS
        dg = tl.zeros([BM, COLUMNS], tl.float32)
        rows = tl.zeros([BM, COLUMNS], tl.float32)
    elif LATE:
        dg = tl.zeros([BM, BN], tl.float32)
        rows = tl.zeros([BM, BN], tl.float32)
    else:
        dg = tl.zeros([BM], tl.float32)
        rows = tl.zeros([BM], tl.float32)

    first = pm * BM + start
    lo, hi, mid = _key_range(
        LO, HI, bh, pm * BM, first, Tq, Tk, window, BM, BN, CAUSAL, WINDOW, PADDED, PACKED, BOUNDED
    )
    if not (WINDOW or PADDED or PACKED):
        for n in range(lo, mid, BN):
            dq, dg, rows = _queries_step(dq, dg, rows, q, do, g, ci, shift, delta, base, columns, K, V, OFF, BASE, COLS, KMASK, DOCS, n,
                                         at, on, od, start + Tq, Tk, window, skt, svt, scale2, D, BD, CAUSAL, POTENTIAL, KERNEL,
                                         WINDOW, PADDED, PACKED, False, NEED_C, FOLD, SUMS, LATE, EVEN, PRECISION)  # fmt: skip
    for n in range(mid, hi, BN):
        dq, dg, rows = _queries_step(dq, dg, rows, q, do, g, ci, shift, delta, base, columns, K, V, OFF, BASE, COLS, KMASK, DOCS, n, at,
                                     on, od, start + Tq, Tk, window, skt, svt, scale2, D, BD, CAUSAL, POTENTIAL, KERNEL, WINDOW,
                                     PADDED, PACKED, True, NEED_C, FOLD, SUMS, LATE, EVEN, PRECISION)  # fmt: skip
    tl.store(DQ + b * sgb + h * sgh + i64[:, None] * sgt + od[None, :], (dq * scale).to(DQ.dtype.element_ty), mask=mask)
    if NEED_C:
        if SUMS:
            column = tl.arange(0, COLUMNS)[None, :]
            near = tl.where((column == 0) | (column == 2) | (column == 5), rows, 0.0)
            dg = tl.sum(near + tl.where(column == 6, dg, 0.0), 1)
            rows = tl.sum(tl.where(column == 6, rows, 0.0), 1)
        elif LATE:
            dg = tl.sum(dg, 1)
            rows = tl.sum(rows, 1)
        if KERNEL == LOG_KERNEL:
            rows = rows * -2.0
            dg = dg * -2.0
        dg -= ci * rows
        if GAIN:
            tl.store(DG + line + i, dg, mask=i < Tq)
        where = DC + bh.to(tl.int64) * Tk + at
        tl.store(where, tl.load(where, mask=i < Tq, other=0.0) - g * rows, mask=i < Tq)


@triton.jit
def backward_table(Q, K, V, TABLE, DO, LSE, DELTA, DTABLE, KMASK, DOCS, sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, sdob,
                   sdoh, sdot, H, GROUP, Tq, Tk, start, window, scale2, batch, D: tl.constexpr, BD: tl.constexpr,
                   BLOCK: tl.constexpr, CAUSAL: tl.constexpr, KERNEL: tl.constexpr, WINDOW: tl.constexpr,
                   PADDED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """The gradient of a table: the scores' gradients, summed in registers over all tiles that share its numbers.

    DENSE: one tile of one head, over the batch. TOEPLITZ: all tiles along a diagonal of tiles, which share their distances,
    over a part of the batch; the caller sums the parts and the diagonals inside the tile.
    """
    tile = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    key_tiles = tl.cdiv(Tk, BLOCK)
    if KERNEL == TOEPLITZ:
        apart = tile - (key_tiles - 1)
        first = tl.maximum(apart, 0)
        count = tl.minimum(tl.cdiv(Tq, BLOCK), key_tiles + apart) - first
    else:
        first = tile // key_tiles
        apart = first - tile % key_tiles
        count = first * 0 + 1
    work = batch * count
    share = tl.cdiv(work, tl.num_programs(2))
    begin = part * share
    end = tl.minimum(begin + share, work)
    if CAUSAL:
        end = tl.where(start + apart * BLOCK + BLOCK > 0, end, begin)
    r = tl.arange(0, BLOCK)
    od = tl.arange(0, BD)
    i = first * BLOCK + r
    j = (first - apart) * BLOCK + r
    TABLE = _head_table(TABLE, h, Tq, Tk, start, KERNEL)
    if KERNEL == TOEPLITZ:  # the first tile may be cut off where others are not
        inside = (i[:, None] - j[None, :] < Tq) & (j[None, :] - i[:, None] < Tk)
        bias = tl.load(TABLE + (start + i[:, None] - j[None, :]), mask=inside, other=0.0)
    else:
        bias = _table(TABLE, (i + start)[:, None], j[None, :], start + Tq, Tk, False, KERNEL)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(begin, end):
        b = (step // count).to(tl.int64)
        row = (first + step % count) * BLOCK
        im = row + r
        jn = row - apart * BLOCK + r
        rows = (im[:, None] < Tq) & (od[None, :] < D)
        keys = (jn[None, :] < Tk) & (od[:, None] < D)
        i64 = im.to(tl.int64)[:, None]
        j64 = jn.to(tl.int64)[None, :]
        q = tl.load(Q + b * sqb + h * sqh + i64 * sqt + od[None, :], mask=rows, other=0.0)
        do = tl.load(DO + b * sdob + h * sdoh + i64 * sdot + od[None, :], mask=rows, other=0.0)
        kT = tl.load(K + b * skb + (h // GROUP) * skh + j64 * skt + od[:, None], mask=keys, other=0.0)
        vT = tl.load(V + b * svb + (h // GROUP) * svh + j64 * svt + od[:, None], mask=keys, other=0.0)
        line = (b * H + h) * Tq + im
        lse = tl.load(LSE + line, mask=im < Tq, other=float("inf"))
        delta = tl.load(DELTA + line, mask=im < Tq, other=0.0)
        p = tl.exp2(tl.dot(q, kT, input_precision=PRECISION) * scale2 + (bias - lse[:, None]))
        seen = _visible((im + start)[:, None], jn[None, :], KMASK + b * Tk, DOCS + b * Tk, Tk, window, CAUSAL, WINDOW,
                        PADDED, PACKED)  # fmt: skip
        p = tl.where(seen, p, 0.0)
        acc += p * (tl.dot(do, vT, input_precision=PRECISION) - delta[:, None])
    if KERNEL == TOEPLITZ:
        place = ((part * H + h) * tl.num_programs(0) + tile) * BLOCK * BLOCK
        tl.store(DTABLE + place + r[:, None] * BLOCK + r[None, :], acc)
    else:
        place = (h * Tq + i.to(tl.int64)[:, None]) * Tk + j[None, :]
        tl.store(DTABLE + place, acc, mask=(i[:, None] < Tq) & (j[None, :] < Tk))
