"""The specification: attention with a bias, written down plainly. Every other backend is judged by it."""

from __future__ import annotations

import torch
from torch import Tensor

from cable_attn.attention.call import Call, in_row_blocks

NAME = "reference"


def refuses(call: Call) -> str | None:
    """It serves everything."""
    return None


def defers(call: Call) -> str | None:
    return None


def run(call: Call) -> Tensor:
    return in_row_blocks(call, _attend)


def weights(call: Call, rows: range, *, only_visible: bool = False) -> Tensor:
    """The attention weights of some queries: [B, H, n, Tk]. A query that sees nothing has all zeros.

    only_visible: without the last keys, if none of the queries sees them.
    """
    i, j = call.indices(rows, only_visible=only_visible)
    q = call.q[:, :, i].to(call.wide) * call.scale
    k = call.k[:, :, : len(j)].to(call.wide).repeat_interleave(call.groups, dim=1)
    scores = q @ k.transpose(-1, -2)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    bias = None if call.bias is None else call.bias.rows(i, j, call.layout.query_start).to(call.wide)
    visible = call.layout.visible(i, j)
    if call.mix is not None:
        scores = call.mix(scores, bias, q, visible)
    elif bias is not None:
        scores = scores + bias
    # The lowest finite number and not −inf, so that a row which sees nothing gives zeros and not NaN.
    return scores.masked_fill(~visible, torch.finfo(call.wide).min).softmax(-1) * visible


def _attend(call: Call, rows: range) -> Tensor:
    with torch.autocast(call.q.device.type, enabled=False):
        p = torch.nn.functional.dropout(weights(call, rows, only_visible=True), call.dropout)
        v = call.v[:, :, : p.shape[-1]].to(call.wide).repeat_interleave(call.groups, dim=1)
        return (p @ v).to(call.v.dtype)
