"""ALiBi: Attention with Linear Biases (Press, Smith and Lewis, 2021).

    b_ij = −m_h |i − j|

with the fixed slopes ``m_h = 2^(−8(h+1)/H)`` for a power of two H; for another H the slopes of the next lower power n,
then every second slope of 2n until all heads have one. It is CABLE with a step of 1 and a constant gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cable_attn.bias import PotentialBias
from cable_attn.devices import widest
from cable_attn.encodings.base import Encoding, PotentialMemory
from cable_attn.layout import Layout


def slopes(heads: int, device: torch.device) -> Tensor:
    """m_h, fp32 [H]. Computed where it is used: a buffer would be rounded by ``model.to(bfloat16)``."""
    power = 2 ** (heads.bit_length() - 1)
    first = torch.arange(1, power + 1, device=device, dtype=widest(device)) * (8 / power)
    rest = torch.arange(heads - power, device=device, dtype=widest(device)) * (8 / power) + 4 / power
    return torch.exp2(-torch.cat([first, rest])).float()


class Alibi(Encoding):
    """Fixed linear biases."""

    per_layer = False
    prunable = True

    def least_gain(self) -> Tensor:
        return slopes(self.geometry.num_heads, torch.device("cpu"))

    def bias(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> PotentialBias:
        c = torch.arange(layout.key_length, device=x.device, dtype=torch.float32)
        return PotentialBias(c[None, None], slopes(self.geometry.num_heads, x.device)[None, :, None])
