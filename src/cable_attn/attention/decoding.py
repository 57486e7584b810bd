"""A few queries against a long cache: its keys are split over many programs, whose parts are then put together.

Each key and value is read once, and so is the potential, as the cache holds it: in fp64. The queries may stand at a
place that only the device knows (a static cache), so that a captured graph serves every step.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cable_attn.attention.call import Call
from cable_attn.attention.operands import masks, potential, rows_of_numbers
from cable_attn.bias import PotentialBias
from cable_attn.devices import current

ROWS = 64
"""How many queries of one key head the kernel takes: those of all query heads that share it."""
KEY_BLOCK = 64
MOST_SPLITS = 128
LOG2E = math.log2(math.e)


def serves(call: Call) -> bool:
    """Few queries against keys that were there before, without gradients."""
    few = call.q.shape[2] * call.groups <= ROWS and not call.layout.is_square
    plain = call.layout.causal and not call.prune and (call.bias is None or isinstance(call.bias, PotentialBias))
    return few and plain and not torch.is_grad_enabled()


def run(call: Call) -> Tensor:
    c, g, kernel = potential(call)
    layout = call.layout
    assert isinstance(layout.query_start, Tensor)
    tensors = rows_of_numbers(call.q, call.k, call.v)
    return decode(*tensors, c, g, layout.query_start, *masks(layout), call.scale, layout.window or 0, kernel)


@torch.library.custom_op("cable_attn::decode", mutates_args=())
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c: Tensor | None,
    g: Tensor | None,
    start: Tensor,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    scale: float,
    window: int,
    kernel: int,
) -> Tensor:
    """Causal attention of q [B, H, Tq, D]; the first query stands at key ``start``, an integer on the device."""
    from cable_attn.attention import decode_kernels

    batch, heads, queries, dim = q.shape
    key_heads, keys = k.shape[1], k.shape[2]
    group = heads // key_heads
    splits = _splits(batch * key_heads, keys, q.device)
    rows = max(16, _power_of_2(group * queries))
    wide: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    parts = torch.empty(batch * key_heads, splits, rows, dim, **wide)
    tops, norms = torch.empty(2, batch * key_heads, splits, rows, **wide)
    out = torch.empty(batch, queries, heads, dim, device=q.device, dtype=q.dtype).transpose(1, 2)
    width = max(16, _power_of_2(dim))
    # A pointer that is never read stands in for what is absent.
    with current(q.device):
        decode_kernels.part[(splits, batch * key_heads)](
            q, k, v, q if c is None else c, q if g is None else g, start, q if key_mask is None else key_mask,
            q if document_ids is None else document_ids, parts, tops, norms, *q.stride()[:3], *k.stride()[:3],
            *v.stride()[:3], *((0, 0, 0) if c is None else c.stride()), key_heads, queries, keys, window, scale * LOG2E,
            GROUP=group, D=dim, BD=width, BM=rows, BN=KEY_BLOCK, POTENTIAL=c is not None, GAIN=g is not None,
            KERNEL=kernel, WINDOW=window > 0, PADDED=key_mask is not None, PACKED=document_ids is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
        )  # fmt: skip
        decode_kernels.together[(batch * key_heads, group * queries)](
            parts, tops, norms, out, *out.stride()[:3], key_heads, queries, splits, GROUP=group, D=dim, BD=width,
            BM=rows, SPLITS=_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out


@decode.register_fake
def _(q, *rest):  # type: ignore[no-untyped-def]
    batch, heads, queries, dim = q.shape
    return q.new_empty(batch, queries, heads, dim).transpose(1, 2)


def _splits(programs: int, keys: int, device: torch.device) -> int:
    """Enough to keep the whole GPU reading, and no more than there are blocks of keys."""
    wanted = math.ceil(2 * _processors(device) / programs)
    return max(1, min(wanted, math.ceil(keys / KEY_BLOCK), MOST_SPLITS))


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # the interpreter
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
