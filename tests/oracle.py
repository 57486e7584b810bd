"""Hand-written fp64 oracles, one number at a time and sharing nothing with the package.

``logits`` gives those of one sequence, [H][T][T], from the formulae in the papers; a key out of sight is ``None``.
Heads, queries and keys are plain loops: slow, and easy to read beside the formula.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(logits: list[list[list[float | None]]], v: Tensor) -> Tensor:
    """softmax(logits) v for one sequence; v [H, T, D]. A row with no visible key gives zeros."""
    out = torch.zeros(len(logits), len(logits[0]), v.shape[-1], dtype=torch.float64)
    for h, rows in enumerate(logits):
        for i, row in enumerate(rows):
            seen = [(j, x) for j, x in enumerate(row) if x is not None]
            if not seen:
                continue
            top = max(x for _, x in seen)
            weights = [(j, math.exp(x - top)) for j, x in seen]
            total = sum(w for _, w in weights)
            for j, w in weights:
                out[h, i] += w / total * v[h, j]
    return out


def logits(name: str, encoding, x: Tensor, q: Tensor, k: Tensor, causal: bool) -> list[list[list[float | None]]]:
    """x [T, C], q and k [H, T, D], all fp64; ``encoding`` is the module whose parameters count."""
    heads, length, dim = q.shape
    raw = [
        [[float(q[h, i] @ k[h, j]) / math.sqrt(dim) for j in range(length)] for i in range(length)]
        for h in range(heads)
    ]
    seen = [[not causal or j <= i for j in range(length)] for i in range(length)]
    if name.startswith("dapev2"):
        b = bias(name.removeprefix("dapev2-"), encoding.inner, x, heads, length, causal)
        return dape(encoding, raw, b, seen)
    if name == "cope":
        return cope(encoding, raw, q, dim)
    b = bias(name, encoding, x, heads, length, causal)
    return [
        [[raw[h][i][j] + b[h][i][j] if seen[i][j] else None for j in range(length)] for i in range(length)]
        for h in range(heads)
    ]


def bias(name: str, encoding, x: Tensor, heads: int, length: int, causal: bool) -> list[list[list[float]]]:
    table = [[[0.0] * length for _ in range(length)] for _ in range(heads)]
    prepared = {h: _one_head(name, encoding, x, h, heads, length, causal) for h in range(heads)}
    for h in range(heads):
        for i in range(length):
            for j in range(length):
                table[h][i][j] = prepared[h](i, j)
    return table


def _one_head(name, encoding, x, h, heads, length, causal):
    if name in ("cable", "cable-nw", "k-cable"):
        f = [max(_affine(encoding.step, x, t, h), 0.0) for t in range(length)]
        c = _running(f)
        g = [1.0] * length
        if name != "cable-nw":
            g = [math.log1p(math.exp(_affine(encoding.strength, x, t, h))) for t in range(length)]

        def b(i, j):
            value = -g[i] * abs(c[i] - c[j])
            return -math.log(1 + value * value) if name == "k-cable" else value

        return b
    if name == "fox":
        c = _running([math.log1p(math.exp(-_affine(encoding.forget, x, t, h))) for t in range(length)])
        return lambda i, j: -abs(c[i] - c[j])
    if name == "alibi":
        slope = alibi_slopes(heads)[h]
        return lambda i, j: -slope * abs(i - j)
    if name.startswith("kerple"):
        p, a = max(float(encoding.p[h]), 0.01), max(float(encoding.a[h]), 0.01)
        if name in ("kerple", "kerple-log"):
            return lambda i, j: -p * math.log(1 + a * abs(i - j))
        return lambda i, j: -a * abs(i - j) ** min(p, 2.0) if i != j else 0.0
    if name == "t5":
        return lambda i, j: float(encoding.table[t5_bucket(i - j, causal), h])
    if name == "fire":
        return lambda i, j: fire(encoding, i, j, h)
    return lambda i, j: 0.0


def _affine(linear, x: Tensor, t: int, h: int) -> float:
    return (linear.weight[h].double() @ x[t] + linear.bias[h].double()).item()


def _running(steps: list[float]) -> list[float]:
    return [math.fsum(steps[: t + 1]) for t in range(len(steps))]


def alibi_slopes(heads: int) -> list[float]:
    """The ALiBi authors' rule, for any number of heads."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    lower = 1 << (heads.bit_length() - 1)
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[0::2][: heads - lower]


def t5_bucket(distance: int, causal: bool) -> int:
    """distance = i − j. 32 buckets, 128 is far."""
    buckets, offset = 32, 0
    if not causal:
        buckets = 16
        offset = 16 if distance < 0 else 0
    n, exact = abs(distance), buckets // 2
    if n < exact:
        return offset + n
    return offset + min(exact + int(math.log(n / exact) / math.log(128 / exact) * (buckets - exact)), buckets - 1)


def fire(encoding, i: int, j: int, h: int) -> float:
    c, limit = float(encoding.c), abs(512 * float(encoding.multiplier))

    def psi(z):
        return math.log(1 + abs(c * z))

    ratio = psi(i - j) / (psi(max(limit, i, j)) + 1e-6)
    hidden = [max(float(w) * ratio + float(b), 0.0) for w, b in zip(encoding.inner.weight[:, 0], encoding.inner.bias)]
    return sum(float(w) * z for w, z in zip(encoding.outer.weight[h], hidden)) + float(encoding.outer.bias[h])


def cope(encoding, raw, q: Tensor, dim: int):
    heads, length = len(raw), len(raw[0])
    out = [[[None] * length for _ in range(length)] for _ in range(heads)]
    last = len(encoding.table) - 1
    for h in range(heads):
        for i in range(length):
            gates = [1 / (1 + math.exp(-raw[h][i][j])) for j in range(i + 1)]
            for j in range(i + 1):
                position = min(sum(gates[j:]), last)
                low = int(position)
                part = position - low
                e = encoding.table[low] * (1 - part) + encoding.table[min(low + 1, last)] * part
                out[h][i][j] = raw[h][i][j] + float(q[h, i] @ e) / math.sqrt(dim)
    return out


def dape(encoding, raw, b, seen):
    heads, length = len(raw), len(raw[0])

    def convolve(layer, rows, row):
        """rows: [channel][key] of one query."""
        weight, offset = layer.weight[:, :, 0, :], layer.bias
        result = []
        for o in range(weight.shape[0]):
            line = []
            for j in range(length):
                total = float(offset[o])
                for channel in range(weight.shape[1]):
                    for tap in range(3):
                        at = j + tap - 1
                        if 0 <= at < length:
                            total += float(weight[o, channel, tap]) * rows[channel][at]
                line.append(total)
            result.append(line)
        return result

    out = [[[None] * length for _ in range(length)] for _ in range(heads)]
    for i in range(length):
        picture = [[raw[h][i][j] if seen[i][j] else 0.0 for j in range(length)] for h in range(heads)]
        picture += [[b[h][i][j] if seen[i][j] else 0.0 for j in range(length)] for h in range(heads)]
        hidden = convolve(encoding.first, picture, i)
        hidden = [[(z if z > 0 else 0.01 * z) if seen[i][j] else 0.0 for j, z in enumerate(line)] for line in hidden]
        extra = convolve(encoding.second, hidden, i)
        for h in range(heads):
            for j in range(length):
                if seen[i][j]:
                    out[h][i][j] = raw[h][i][j] + b[h][i][j] + extra[h][j]
    return out


def rope(x: Tensor, base: float = 10000.0) -> Tensor:
    """x [H, T, D] turned pair by pair, as complex numbers."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        for pair in range(half):
            turn = complex(math.cos(t * base ** (-pair / half)), math.sin(t * base ** (-pair / half)))
            for h in range(x.shape[0]):
                z = complex(float(x[h, t, pair]), float(x[h, t, pair + half])) * turn
                out[h, t, pair], out[h, t, pair + half] = z.real, z.imag
    return out


def sinusoid(t: int, channel: int, width: int) -> float:
    angle = t / 10000 ** (2 * (channel // 2) / width)
    return math.sin(angle) if channel % 2 == 0 else math.cos(angle)
