"""KERPLE: kernelised relative positions (Chi et al., 2022), two learned numbers per head.

log      b_ij = −p log(1 + a |i − j|)        p ~ U(0, 2), a ~ U(0, 1), both kept at least 1e-2
power    b_ij = −a |i − j|^p                 the same, p at most 2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cable_attn.bias import ToeplitzBias
from cable_attn.encodings.base import Encoding, Geometry, PotentialMemory, distances
from cable_attn.layout import Layout

SMALLEST = 1e-2


def keep_within(value: Tensor, low: float, high: float | None = None) -> Tensor:
    """Clamp the value but not its gradient: a parameter that has left the range can come back."""
    return value + (value.clamp(low, high) - value).detach()


class KerpleLog(Encoding):
    """Logarithmic decay."""

    def __init__(self, geometry: Geometry):
        super().__init__(geometry)
        self.p = nn.Parameter(torch.empty(geometry.num_heads))
        self.a = nn.Parameter(torch.empty(geometry.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.p, 0, 2)
        nn.init.uniform_(self.a, 0, 1)

    def bias(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> ToeplitzBias:
        wide = torch.promote_types(self.p.dtype, torch.float32)
        table = self.curve(distances(layout).abs().to(wide), self.p.to(wide)[:, None], self.a.to(wide)[:, None])
        return ToeplitzBias(table, zero=0 if layout.causal else layout.key_length - 1)

    def curve(self, n: Tensor, p: Tensor, a: Tensor) -> Tensor:
        return -keep_within(p, SMALLEST) * torch.log1p(keep_within(a, SMALLEST) * n)


class KerplePower(KerpleLog):
    """Power decay."""

    def curve(self, n: Tensor, p: Tensor, a: Tensor) -> Tensor:
        # 0^p has no gradient for p, so the distance 0 goes around the power.
        power = torch.where(n > 0, n.clamp(min=1) ** keep_within(p, SMALLEST, 2.0), 0.0)
        return -keep_within(a, SMALLEST) * power
