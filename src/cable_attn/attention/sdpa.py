"""PyTorch's ``scaled_dot_product_attention``, on any device.

A causal potential bias needs no T×T tensor: ``−g_i c_i`` is constant along a row and cancels in the softmax, so
``s_ij + g_i c_j`` is the whole method, and one more column on q (the gain) and on k (the potential) computes it.
The columns are fp32 and centred on the rows at hand, so that the rounding of ``g_i c_j`` does not grow with the text.
Every other bias is written out, a block of rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from cable_attn.attention.call import Call, in_row_blocks
from cable_attn.bias import PotentialBias

NAME = "sdpa"
COLUMN_ROWS = 4096
"""How many rows share one centre of the potential. Over so many tokens that each add 1 to the distance, fp32 rounds a
score with a gain of 1 to about 1e-4: the larger g c, the coarser."""
HIDDEN_KEY = -1e9
"""The column value of a padded key: lower than any bias, for a weight of exactly 0; and 0 for all others."""


def refuses(call: Call) -> str | None:
    if call.mix is not None:
        return "this encoding changes the scores themselves (mix), and PyTorch's kernels do not hand them out"
    if call.softcap is not None:
        return "PyTorch's kernels have no soft-capping"
    return None


def defers(call: Call) -> str | None:
    return None


def run(call: Call) -> Tensor:
    with torch.autocast(call.q.device.type, enabled=False):
        if takes_columns(call):
            if _needs_no_mask(call) and call.layout.query_length <= COLUMN_ROWS:
                return _square_columns(call)
            return in_row_blocks(call, _attend, most=COLUMN_ROWS)
        if call.bias is None and call.layout.key_mask is None and _needs_no_mask(call):
            return scaled_dot_product_attention(
                call.q,
                call.k,
                call.v,
                dropout_p=call.dropout,
                is_causal=call.layout.causal,
                scale=call.scale,
                enable_gqa=call.groups > 1,
            )
        return in_row_blocks(call, _attend)


def takes_columns(call: Call) -> bool:
    """The bias is one column of q times one column of k."""
    return isinstance(call.bias, PotentialBias) and call.bias.kernel is None and call.layout.causal


def _needs_no_mask(call: Call) -> bool:
    """Padding aside, PyTorch's own causal mask is the whole mask."""
    layout = call.layout
    return layout.window is None and layout.document_ids is None and (layout.is_square or not layout.causal)


def _square_columns(call: Call) -> Tensor:
    """A whole text at once. Padded keys are hidden by a second column."""
    queries = range(call.layout.query_length)
    q, k, v = _columns(call, queries, len(queries))
    key_mask = call.layout.key_mask
    if key_mask is not None:
        q = torch.cat([q, q.new_ones(()).expand(*q.shape[:-1], 1)], dim=-1)
        hidden = torch.where(key_mask, 0.0, HIDDEN_KEY).to(k.dtype)
        k = torch.cat([k, hidden[:, None, :, None].expand(*k.shape[:-1], 1)], dim=-1)
    out = scaled_dot_product_attention(*_one_width(q, k, v), dropout_p=call.dropout, is_causal=True, scale=1.0)
    out = out[..., : v.shape[-1]]
    if key_mask is not None:
        sees_nothing = key_mask.cumsum(-1) == 0
        out = out.masked_fill(sees_nothing[:, None, :, None], 0.0)
    return out.to(call.v.dtype)


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values as wide as queries and keys, or PyTorch leaves its fast kernel."""
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def _columns(call: Call, rows: range, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with the gain and the potential as their last column, and v; all per query head and in fp32 or fp64.

    The softmax scale is in q already.
    """
    assert isinstance(call.bias, PotentialBias)
    batch, heads = call.q.shape[:2]
    middle = (rows.start + rows.stop) // 2 + call.layout.query_start
    if isinstance(middle, int):
        centre = call.bias.c[..., middle : middle + 1]
    else:
        centre = call.bias.c.index_select(-1, middle.reshape(1))
    c = call.bias.c - centre.detach()
    c = c[..., :keys].to(call.wide).unsqueeze(-1).expand(batch, heads, keys, 1)
    g = call.bias.g
    if g is None:
        g = c.new_ones(1, 1, 1)
    elif g.shape[-1] > 1:
        g = g[..., rows.start : rows.stop]
    q = call.q[:, :, rows.start : rows.stop].to(call.wide) * call.scale
    k, v = (x[:, :, :keys].to(call.wide).repeat_interleave(call.groups, dim=1) for x in (call.k, call.v))
    q = torch.cat([q, g.to(call.wide).unsqueeze(-1).expand(*q.shape[:-1], 1)], dim=-1)
    return q, torch.cat([k, c], dim=-1), v


def _attend(call: Call, rows: range) -> Tensor:
    """Some rows with an explicit mask."""
    i, j = call.indices(rows, only_visible=True)
    visible = call.layout.visible(i, j)
    sees_nothing = ~visible.any(-1, keepdim=True)
    mask = visible | sees_nothing  # such a row may look anywhere: it is set to 0 below
    scale, grouped = call.scale, False
    if takes_columns(call):
        q, k, v = _one_width(*_columns(call, rows, len(j)))
        scale = 1.0
    else:
        wide = call.q.dtype if call.bias is None else call.wide
        q, k, v = call.q[:, :, i].to(wide), call.k[:, :, : len(j)].to(wide), call.v[:, :, : len(j)].to(wide)
        grouped = call.groups > 1
        if call.bias is not None:
            bias = call.bias.rows(i, j, call.layout.query_start).to(wide)
            mask = bias.masked_fill(~mask, float("-inf"))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=call.dropout, scale=scale, enable_gqa=grouped)
    return out[..., : call.v.shape[-1]].masked_fill(sees_nothing, 0.0).to(call.v.dtype)
