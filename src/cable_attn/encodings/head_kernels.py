"""The products of :mod:`cable_attn.encodings.head_linear` in Triton: few outputs, so that reading x is all the time.

An fp32 number is split into three of x's precision, whose products with x are exact in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, FEATURES = 64, 64
"""The size of a tile of x."""
CHUNK = 512
"""How many tokens one program sums for the gradient of the weights."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, T, C] times weight [n, C]: fp32 [B, n, T]."""
    batch, length, features = x.shape
    outputs = weight.shape[0]
    y = torch.empty(batch, outputs, length, device=x.device, dtype=torch.float32)
    _product[(triton.cdiv(batch * length, TOKENS),)](
        x,
        weight,
        y,
        batch * length,
        length,
        features,
        outputs,
        BN=_padded(outputs),
        BT=TOKENS,
        BC=FEATURES,
        num_stages=3,
    )
    return y


def steps_and_gains(
    x: Tensor, step: Tensor, step_bias: Tensor, strength: Tensor | None, strength_bias: Tensor | None, floor: float
) -> tuple[Tensor, Tensor]:
    """Of x [B, T, C]: fp32 [B, H, T], the second empty without a strength. Nothing is kept for a backward pass."""
    batch, length, features = x.shape
    heads = step.shape[0]
    steps = torch.empty(batch, heads, length, device=x.device, dtype=torch.float32)
    gains = torch.empty(0 if strength is None else steps.shape, device=x.device, dtype=torch.float32)
    # A pointer that is never read stands in for what is absent.
    _steps_and_gains[(triton.cdiv(batch * length, TOKENS),)](
        x, step, step_bias, step if strength is None else strength, step_bias if strength_bias is None else strength_bias,
        steps, gains, batch * length, length, features, heads, floor, GAIN=strength is not None, BN=_padded(heads),
        BT=TOKENS, BC=FEATURES, num_stages=3,
    )  # fmt: skip
    return steps, gains


def gradients(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of the weight."""
    batch, length, features = x.shape
    outputs, tokens = weight.shape[0], batch * length
    sizes = (tokens, length, features, outputs)
    tile = {"BN": _padded(outputs), "BT": TOKENS, "BC": FEATURES}
    dx = torch.empty_like(x)
    _gradient_of_x[(triton.cdiv(tokens, TOKENS), triton.cdiv(features, FEATURES))](dy, weight, dx, *sizes, **tile)
    chunks = triton.cdiv(tokens, CHUNK)
    parts = torch.empty(chunks, outputs, features, device=x.device, dtype=torch.float32)
    _gradient_of_weight[(triton.cdiv(features, FEATURES), chunks)](
        dy, x, parts, *sizes, CHUNK_TOKENS=CHUNK, num_stages=3, **tile
    )
    return dx, parts.sum(0)


def _padded(outputs: int) -> int:
    return max(16, triton.next_power_of_2(outputs))


@triton.jit
def _pieces(x, precision: tl.constexpr):
    first = x.to(precision)
    rest = x - first.to(tl.float32)
    second = rest.to(precision)
    third = (rest - second.to(tl.float32)).to(precision)
    return first, second, third


@triton.jit
def _load_x(X, t, c, tokens, features):
    return tl.load(
        X + t.to(tl.int64)[:, None] * features + c[None, :],
        mask=(t[:, None] < tokens) & (c[None, :] < features),
        other=0.0,
    )


@triton.jit
def _load_weight(W, n, c, outputs, features):
    return tl.load(
        W + n[:, None] * features + c[None, :], mask=(n[:, None] < outputs) & (c[None, :] < features), other=0.0
    )


@triton.jit
def _outputs(Y, n, t, length, outputs):
    """Where output n of token t lies."""
    return (
        Y
        + ((t // length).to(tl.int64) * outputs)[None, :] * length
        + n.to(tl.int64)[:, None] * length
        + (t % length)[None, :]
    )


@triton.jit
def _add_product(y, x, w):
    """w in fp32, or as x."""
    if w.dtype == x.dtype:
        y = tl.dot(x, tl.trans(w), y)
    else:
        w0, w1, w2 = _pieces(w, x.dtype)
        y = tl.dot(x, tl.trans(w0), y)
        y = tl.dot(x, tl.trans(w1), y)
        y = tl.dot(x, tl.trans(w2), y)
    return y


@triton.jit
def _softplus(s):
    return tl.maximum(s, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(s)))


@triton.jit
def _steps_and_gains(X, W, BIAS, WG, BIASG, STEPS, GAINS, tokens, length, features, heads, floor, GAIN: tl.constexpr,
                     BN: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.arange(0, BN)
    step = tl.zeros([BT, BN], tl.float32)
    strength = tl.zeros([BT, BN], tl.float32)
    for first in range(0, features, BC):
        c = first + tl.arange(0, BC)
        x = _load_x(X, t, c, tokens, features)
        step = _add_product(step, x, _load_weight(W, n, c, heads, features))
        if GAIN:
            strength = _add_product(strength, x, _load_weight(WG, n, c, heads, features))
    inside = (n[:, None] < heads) & (t[None, :] < tokens)
    step += tl.load(BIAS + n, mask=n < heads, other=0.0).to(tl.float32)[None, :]
    tl.store(_outputs(STEPS, n, t, length, heads), tl.trans(tl.maximum(step, 0.0)), mask=inside)
    if GAIN:
        strength += tl.load(BIASG + n, mask=n < heads, other=0.0).to(tl.float32)[None, :]
        tl.store(_outputs(GAINS, n, t, length, heads), tl.trans(_softplus(strength) + floor), mask=inside)


@triton.jit
def _product(X, W, Y, tokens, length, features, outputs, BN: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.arange(0, BN)
    y = tl.zeros([BT, BN], tl.float32)
    for first in range(0, features, BC):
        c = first + tl.arange(0, BC)
        y = _add_product(y, _load_x(X, t, c, tokens, features), _load_weight(W, n, c, outputs, features))
    tl.store(_outputs(Y, n, t, length, outputs), tl.trans(y), mask=(n[:, None] < outputs) & (t[None, :] < tokens))


@triton.jit
def _gradient_of_x(DY, W, DX, tokens, length, features, outputs, BN: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """As good as its own precision: the smallest products are left out."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n = tl.arange(0, BN)
    low: tl.constexpr = DX.dtype.element_ty
    dy = tl.load(_outputs(DY, n, t, length, outputs), mask=(n[:, None] < outputs) & (t[None, :] < tokens), other=0.0)
    d0, d1, _ = _pieces(dy, low)
    w0, w1, _ = _pieces(_load_weight(W, n, c, outputs, features), low)
    dx = tl.dot(tl.trans(d0), w0)
    dx = tl.dot(tl.trans(d1), w0, dx)
    dx = tl.dot(tl.trans(d0), w1, dx)
    place = DX + t.to(tl.int64)[:, None] * features + c[None, :]
    tl.store(place, dx.to(low), mask=(t[:, None] < tokens) & (c[None, :] < features))


@triton.jit
def _gradient_of_weight(DY, X, PARTS, tokens, length, features, outputs, CHUNK_TOKENS: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
                        BC: tl.constexpr):  # fmt: skip
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    n = tl.arange(0, BN)
    dw = tl.zeros([BN, BC], tl.float32)
    for first in range(0, CHUNK_TOKENS, BT):
        t = tl.program_id(1) * CHUNK_TOKENS + first + tl.arange(0, BT)
        x = _load_x(X, t, c, tokens, features)
        dy = tl.load(
            _outputs(DY, n, t, length, outputs), mask=(n[:, None] < outputs) & (t[None, :] < tokens), other=0.0
        )
        d0, d1, d2 = _pieces(dy, x.dtype)
        dw = tl.dot(d0, x, dw)
        dw = tl.dot(d1, x, dw)
        dw = tl.dot(d2, x, dw)
    place = PARTS + (tl.program_id(1) * outputs + n).to(tl.int64)[:, None] * features + c[None, :]
    tl.store(place, dw, mask=(n[:, None] < outputs) & (c[None, :] < features))
