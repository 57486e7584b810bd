"""Attention as most research code writes it: the whole score matrix, the bias added to it, a softmax.

Only by name, never chosen by ``auto``: it is what the benchmarks compare with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cable_attn.attention.call import Call

NAME = "materialised"


def refuses(call: Call) -> str | None:
    if call.mix is not None:
        return "this encoding changes the scores themselves (mix); the reference serves it"
    if call.softcap is not None:
        return "it has no soft-capping; the reference has"
    return None


def defers(call: Call) -> str | None:
    return "it holds all scores at once"


def run(call: Call) -> Tensor:
    """Products in the precision of q, k and v; the softmax in float32."""
    i, j = call.indices(range(call.q.shape[2]))
    k, v = (x.repeat_interleave(call.groups, dim=1) for x in (call.k, call.v))
    with torch.autocast(call.q.device.type, enabled=False):
        scores = (call.q @ k.mT).to(call.wide) * call.scale
        if call.bias is not None:
            scores = scores + call.bias.rows(i, j, call.layout.query_start).to(call.wide)
        visible = call.layout.visible(i, j)
        weights = scores.masked_fill(~visible, torch.finfo(call.wide).min).softmax(-1) * visible
        weights = torch.nn.functional.dropout(weights, call.dropout)
        return weights.to(v.dtype) @ v
