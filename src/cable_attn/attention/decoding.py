"""A few queries against a long cache: its keys are split over many programs, whose parts are then put together.

Each key and value is read once, and so is the potential, as the cache holds it: in fp64. The queries may stand at a
place that only the device knows (a static cache), so that a captured graph serves every step.

With ``prune=ε`` and the summaries of the cache's blocks (their means, and how far the keys lie from them), a block that
provably weighs less than its share of ε is not read; see :mod:`cable_attn.attention.pruning` for the bound. Every block
has the same share here, so that each can be judged alone, and Z is bounded by the nearest keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cable_attn.attention.call import Call
from cable_attn.attention.operands import KEY_BLOCK, LOG2E, masks, padded, potential, rows_of_numbers
from cable_attn.bias import Index, PotentialBias, TokenBias
from cable_attn.devices import current, kernels_run_on

ROWS = 32
"""How many queries of one key head the kernel takes: those of all query heads that share it."""
MOST_SPLITS = 128
PROGRAMS = 4
"""How many run at once on each processor of the GPU, by the registers that they need."""
WAVE_COST = 0.05
"""Of the time that they all take, for each time that the GPU is filled with them."""
WIDTH = 32
"""How many blocks are judged at once."""
SHORT = 2
"""With so many blocks for each program, all are read and none is judged."""
FEATURES = 1024
"""A token's step and gain are made by every program that attends for it, of up to so many features; of more, once."""
PREFETCHED = 64 * 1024
"""Bytes of keys and values that one program has under way, about."""


def serves(call: Call) -> bool:
    """Few queries against keys that were there before, without gradients."""
    few = call.q.shape[2] * call.groups <= ROWS and not call.layout.is_square
    plain = call.bias is None or isinstance(call.bias, PotentialBias) or call.q.shape[2] == 1
    return few and plain and call.layout.causal and not torch.is_grad_enabled()


def run(call: Call) -> Tensor:
    layout, token = call.layout, None
    if isinstance(call.bias, TokenBias):
        if call.groups == 1 and call.bias.token.x.shape[-1] <= FEATURES:
            token = call.bias.token
        else:
            call = settled(call)
    c, g, kernel = potential(call)
    if call.bias is not None and c is None:  # of one query any bias is a potential: what all its keys share cancels
        c = call.bias.rows(*call.indices(range(1)), layout.query_start).squeeze(2).expand(*call.q.shape[:2], -1)
    means, numbers = None, None
    if call.prune and call.summaries is not None and layout.document_ids is None:
        means, numbers = call.summaries
    serve: Callable[..., Tensor] = _decode
    if torch.compiler.is_compiling():
        serve = torch.ops.cable_attn.decode if token is None else torch.ops.cable_attn.decode_token
    return serve(
        *rows_of_numbers(call.q, call.k, call.v), c, g, *_place(layout.query_start), *masks(layout), means, numbers,
        call.scale, layout.window or 0, kernel, call.prune or 0.0, *(token or ()),
    )  # fmt: skip


def settled(call: Call) -> Call:
    """The same call with the step and the gain of a new token made, by a single kernel; one without is as it was."""
    bias, start = call.bias, call.layout.query_start
    if not isinstance(bias, TokenBias):
        return call
    if not isinstance(start, Tensor) or not kernels_run_on(bias.c.device):
        return replace(call, bias=bias.settled(start))
    gain = advance(bias.c, start, bias.key_mask, *bias.token)
    return replace(call, bias=PotentialBias(bias.c, None if bias.token.strength is None else gain, bias.kernel))


def _place(start: Index) -> tuple[Tensor | None, int]:
    return (start, 0) if isinstance(start, Tensor) else (None, start)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor | None,
    g: Tensor | None,
    start: Tensor | None,
    place: int,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    means: Tensor | None,
    numbers: Tensor | None,
    scale: float,
    window: int,
    kernel: int,
    epsilon: float,
    x: Tensor | None = None,
    step: Tensor | None = None,
    step_bias: Tensor | None = None,
    strength: Tensor | None = None,
    strength_bias: Tensor | None = None,
    floor: float = 0.0,
) -> Tensor:
    """Causal attention of q [B, H, Tq, D]; the first query stands at key ``start``, an integer on the device, or
    ``place``. means, numbers: what :func:`summarise` has written.
    x and so on: a :class:`~cable_attn.bias.NewToken`, the only query, whose potential is then written into c."""
    from cable_attn.attention import decode_kernels, pruning

    batch, heads, queries, dim = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    group = heads // key_heads
    seen = keys if start is not None else place + queries
    splits = _splits(batch * key_heads, math.ceil(seen / KEY_BLOCK), q.device)
    one = group * queries == 1
    rows = 1 if one else padded(group * queries)
    wide: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    parts = torch.empty(batch * key_heads, splits, rows, dim, **wide)
    tops, norms = torch.empty(2, batch * key_heads, splits, rows, **wide)
    out = torch.empty(batch, queries, heads, dim, device=q.device, dtype=q.dtype).transpose(1, 2)
    width = padded(dim)
    stages = _stages(width * q.element_size(), c is not None)
    features = 16 if x is None else x.shape[-1]
    # A pointer that is never read stands in for what is absent.
    with current(q.device):
        decode_kernels.part[(splits, batch * key_heads)](
            q, k, v, *(q if some is None else some for some in (c, g, start, key_mask, document_ids, means, numbers)),
            parts, tops, norms,
            *(q if some is None else some for some in (x, step, step_bias, strength, strength_bias)), *q.stride()[:3],
            *k.stride()[:3], *v.stride()[:3], *((0, 0, 0) if c is None else c.stride()), key_heads, queries, keys,
            0 if means is None else means.shape[2], place, window, scale * LOG2E, epsilon, features, floor,
            TOKEN=x is not None, BC=padded(features), GROUP=group, D=dim, BD=width, BM=rows, BN=KEY_BLOCK, ONE=one,
            KNOWN=start is None, POTENTIAL=c is not None, GAIN=g is not None or strength is not None, KERNEL=kernel,
            WINDOW=window > 0, PADDED=key_mask is not None, PACKED=document_ids is not None, PRUNED=means is not None,
            WIDTH=WIDTH, SHORT=SHORT, NEAR_KEYS=pruning.NEAR, SLACK_FACTOR=pruning.SLACK, STAGES=stages,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_stages=stages, num_warps=4,
        )  # fmt: skip
        decode_kernels.together[(batch * key_heads, group * queries)](
            parts, tops, norms, out, *out.stride()[:3], key_heads, queries, splits, GROUP=group, D=dim, BD=width,
            BM=rows, SPLITS=padded(splits), num_warps=4,
        )  # fmt: skip
    return out


_operators = (
    torch.library.custom_op("cable_attn::decode", _decode, mutates_args=()),
    torch.library.custom_op("cable_attn::decode_token", _decode, mutates_args=("c",)),
)


def _shape_of_output(q, *rest):  # type: ignore[no-untyped-def]
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim).transpose(1, 2)


for _operator in _operators:
    _operator.register_fake(_shape_of_output)


@torch.library.custom_op("cable_attn::advance", mutates_args=("c",))
def advance(
    c: Tensor,
    start: Tensor,
    key_mask: Tensor | None,
    x: Tensor,
    step: Tensor,
    step_bias: Tensor,
    strength: Tensor | None,
    strength_bias: Tensor | None,
    floor: float,
) -> Tensor:
    """Write the potential of one new token into c, as :class:`~cable_attn.bias.TokenBias` says; its gain [B, H, 1]."""
    from cable_attn.attention import decode_kernels

    batch, heads, features = x.shape[0], step.shape[0], x.shape[2]
    gain = torch.empty(batch, heads, 1, device=x.device, dtype=torch.float32)
    # A pointer that is never read stands in for what is absent.
    with current(x.device):
        decode_kernels.advance[(heads, batch)](
            x.contiguous(), step, step_bias, step if strength is None else strength,
            step_bias if strength_bias is None else strength_bias, c, start, x if key_mask is None else key_mask, gain,
            *c.stride(), heads, features, c.shape[2], floor, GAIN=strength is not None, PADDED=key_mask is not None,
            BC=min(padded(features), FEATURES), num_warps=4,
        )  # fmt: skip
    return gain


@advance.register_fake
def _(c, start, key_mask, x, step, *rest):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], step.shape[0], 1, dtype=torch.float32)


def summarise(
    k: Tensor, means: Tensor, numbers: Tensor, start: Tensor | None, place: int, queries: int, everything: bool
) -> None:
    """Write means [B, H, blocks, D] and numbers [B, H, blocks, 4] of the blocks that the keys from ``start`` (or
    ``place``) to ``start + queries`` complete; everything: and of all before."""
    serve = torch.ops.cable_attn.summarise if torch.compiler.is_compiling() else _summarise
    serve(k, means, numbers, start, place, queries, everything)


def _summarise(
    k: Tensor, means: Tensor, numbers: Tensor, start: Tensor | None, place: int, queries: int, everything: bool
) -> None:
    from cable_attn.attention import pruning

    batch, key_heads, keys, dim = k.shape
    blocks = keys // KEY_BLOCK if everything else queries // KEY_BLOCK + 1
    if not blocks:
        return
    with current(k.device):
        pruning.summarise_new[(blocks, batch * key_heads)](
            k, means, numbers, k if start is None else start, *k.stride()[:3], key_heads, keys, means.shape[2], place,
            queries, D=dim, BD=padded(dim), BN=KEY_BLOCK, KNOWN=start is None, ALL=everything,
            SLACK_FACTOR=pruning.SPREAD_SLACK, num_warps=4,
        )  # fmt: skip


_summaries = torch.library.custom_op("cable_attn::summarise", _summarise, mutates_args=("means", "numbers"))
_summaries.register_fake(lambda *operands: None)


def blank_summaries(k: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Room for the summaries of so many keys like ``k`` [B, H, Tk, D]."""
    batch, heads, _, dim = k.shape
    blocks = max(keys // KEY_BLOCK, 1)
    return k.new_zeros(batch, heads, blocks, dim), k.new_zeros(batch, heads, blocks, 4, dtype=torch.float32)


def _stages(row: int, potential: bool) -> int:
    """Of the pipeline, for keys of so many bytes: two read plain keys faster than one or three. With potentials the
    compiler has loads under way by itself, and one is best."""
    return 1 if potential else min(2, 1 + PREFETCHED // (2 * KEY_BLOCK * row))


@cache
def _splits(programs: int, blocks: int, device: torch.device) -> int:
    """How many programs share the blocks of keys of one head, so that the whole GPU reads to the end.

    So many fit at once; one more than that, and it runs on when all others have ended.
    """
    at_once = PROGRAMS * _processors(device)

    def cost(splits: int) -> float:
        waves = math.ceil(programs * splits / at_once)
        return waves / splits * (1 + WAVE_COST * waves)

    return min(range(1, max(1, min(blocks, MOST_SPLITS)) + 1), key=cost)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # the interpreter
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
