"""For models of your own: any encoding's bias as a module, and as a ``score_mod`` for FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cable_attn.bias import KERNELS, Bias, PotentialBias, ToeplitzBias
from cable_attn.encodings import ENCODINGS, Encoding, Geometry, find_encoding
from cable_attn.errors import CableError
from cable_attn.layout import Layout


class CableBias(nn.Module):
    """The bias of one attention layer, from what the layer reads: ``attention(q, k, v, bias(x))``.

    dim: the size of x; heads: query heads. encoding: cable, or another that acts by a bias alone; options: its own.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        encoding: str = "cable",
        *,
        causal: bool = True,
        max_length: int = 1024,
        **options: Any,
    ):
        super().__init__()
        if dim < 1 or heads < 1 or dim % heads:
            raise CableError(f"dim={dim} is not a multiple of heads={heads}.")
        found = find_bias_encoding(encoding, options, causal)
        self.causal = causal
        self.encoding = found(Geometry(dim, heads, dim // heads, max_length, causal), **options)
        for module in self.modules():
            if isinstance(module, Encoding):
                module.reset_parameters()

    def forward(self, x: Tensor, key_mask: Tensor | None = None, document_ids: Tensor | None = None) -> Bias:
        """x [B, T, dim]; key_mask [B, T] is false for padding; document_ids [B, T] for packed documents."""
        length = x.shape[1]
        layout = Layout(length, length, 0, x.device, self.causal, key_mask=key_mask, document_ids=document_ids)
        bias: Bias = self.encoding(x, layout)
        return bias


def find_bias_encoding(name: str, options: Mapping[str, Any], causal: bool) -> type[Encoding]:
    """The class of that name, if all that it does is to add a bias."""
    found = find_encoding(name, options, causal=causal)
    if not acts_by_bias(found):
        names = ", ".join(name for name, known in ENCODINGS.items() if acts_by_bias(known))
        raise CableError(
            f"the encoding {name!r} does more than add a bias to the scores, or adds none. These add one and no more: "
            f"{names}."
        )
    return found


def acts_by_bias(encoding: type[Encoding]) -> bool:
    """Whether all that it does is to add something to the scores."""
    others = (encoding.embed is Encoding.embed, encoding.rotate is Encoding.rotate, encoding.mix is None)
    return encoding.bias is not Encoding.bias and all(others)


def score_mod(bias: Bias) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """For ``flex_attention(q, k, v, score_mod=score_mod(bias))``: queries and keys are the same tokens.

    The causal mask is FlexAttention's business (a block mask), as always.
    """
    if isinstance(bias, ToeplitzBias):
        table, zero, one = bias.table, bias.zero, bias.table.shape[0] == 1

        def from_table(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[h * 0 if one else h, (i - j + zero).clamp(0, table.shape[-1] - 1)]

        return from_table
    if not isinstance(bias, PotentialBias):
        raise CableError(f"a {type(bias).__name__} has no form that FlexAttention could compute inside its kernel.")
    c, g = bias.c, bias.g
    kernel = KERNELS[bias.kernel] if bias.kernel else None
    one_text, one_head = (c.shape[d] == 1 for d in (0, 1))

    def from_potential(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row, head = b * 0 if one_text else b, h * 0 if one_head else h
        distance = (c[row, head, i] - c[row, head, j]).to(score.dtype)
        felt = torch.where(i >= j, distance, -distance)
        if g is not None:
            at = [index * 0 if size == 1 else index for index, size in zip((b, h, i), g.shape)]
            felt = g[at[0], at[1], at[2]] * felt
        return score + (kernel(-felt) if kernel is not None else -felt)

    return from_potential
