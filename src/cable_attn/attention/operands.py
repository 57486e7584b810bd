"""A call as the Triton kernels read it."""

from __future__ import annotations

import torch
from torch import Tensor

from cable_attn.attention.call import Call
from cable_attn.bias import PotentialBias, TokenBias
from cable_attn.layout import Layout

KERNELS = {None: 0, "log": 1}


def potential(call: Call) -> tuple[Tensor | None, Tensor | None, int]:
    """c [B, H, Tk], g [B, H, Tq] and the number of κ; nothing of a bias that is not of this form."""
    bias = call.bias
    if isinstance(bias, TokenBias):
        return bias.c, None, KERNELS[bias.kernel]
    if not isinstance(bias, PotentialBias):
        return None, None, 0
    batch, heads, queries, _ = call.q.shape
    g = None if bias.g is None else bias.g.float().expand(batch, heads, queries).contiguous()
    return bias.c.expand(batch, heads, -1), g, KERNELS[bias.kernel]


def masks(layout: Layout) -> tuple[Tensor | None, Tensor | None]:
    """Which keys are real, and their documents."""
    key_mask, document_ids = layout.key_mask, layout.document_ids
    if key_mask is not None:
        key_mask = key_mask.contiguous()
    if document_ids is not None:
        document_ids = document_ids.to(torch.int32).contiguous()
    return key_mask, document_ids


def rows_of_numbers(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With the numbers of a head side by side; all other strides are the kernels' business."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def padded(count: int) -> int:
    """A head dimension, or a number of rows, as the kernels lay it out: a power of two."""
    return max(16, 1 << (count - 1).bit_length())
