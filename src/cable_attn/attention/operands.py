"""A call as the Triton kernels read it, and the numbers on which they and those who call them must agree."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cable_attn.attention.call import Call
from cable_attn.bias import PotentialBias, TokenBias
from cable_attn.layout import Layout

LINEAR, LOG, TOEPLITZ, DENSE = range(4)
"""What KERNEL says: κ of a potential, or a table of biases in its place."""
KERNELS = {None: LINEAR, "log": LOG}
LOG2E = math.log2(math.e)
SPLIT = 128
"""How many keys share a base of the potential: a multiple of every tile."""
KEY_BLOCK = 64
"""How many keys pruning judges together."""
BOUND_ROWS = 64
"""How many rows share a pair of pruning bounds."""
COLUMNS = 16
"""Of a key's potential, or a query's gain, in low precision."""


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
