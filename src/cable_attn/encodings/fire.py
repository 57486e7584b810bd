"""FIRE: Functional Interpolation for Relative Positions (Li et al., 2023).

    b_ij = f( ψ(i − j) / (ψ(max(L, i)) + ε) )        ψ(x) = log(1 + |c x|)

f is an MLP 1 → 32 → H with ReLU; c (0.1 at first) and the multiplier of L = 512 are learned; i is counted inside the
document. For bidirectional attention the later of the two tokens takes the place of i, so that the ratio stays below 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cable_attn.bias import FunctionBias, Index
from cable_attn.encodings.base import Encoding, Geometry, PotentialMemory, at_least_float32
from cable_attn.errors import CableError
from cable_attn.layout import Layout

EPSILON = 1e-6


class Fire(Encoding):
    """A learned function of the normalised distance. Not Toeplitz: it depends on where the query stands."""

    def __init__(self, geometry: Geometry, *, width: int = 32, threshold: float = 512.0):
        super().__init__(geometry)
        if width < 1:
            raise CableError(f"width must be at least 1, got {width}.")
        self.threshold = threshold
        self.inner = nn.Linear(1, width)
        self.outer = nn.Linear(width, geometry.num_heads)
        self.c = nn.Parameter(torch.empty(()))
        self.multiplier = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.multiplier, 1.0)
        # One input: the usual N(0, 0.02) would leave the function flat.
        for linear in (self.inner, self.outer):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(linear.bias)

    def bias(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> FunctionBias:
        wide = at_least_float32(self.c.dtype)

        def psi(distance: Tensor) -> Tensor:
            return torch.log1p((self.c.to(wide) * distance).abs())

        def block(i: Tensor, j: Tensor, query_start: Index) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                distance = ((i + query_start)[:, None] - j).to(wide)  # [n, m]
                own = i + (query_start - layout.query_start)  # the call may be of a part of the queries
                place = layout.positions[:, own, None].to(wide)  # [B or 1, n, 1]
                if not layout.causal:
                    place = torch.maximum(place, place - distance)
                floor = (self.threshold * self.multiplier.to(wide)).abs()
                ratio = psi(distance) / (psi(torch.maximum(place, floor)) + EPSILON)
                hidden = nn.functional.linear(ratio.unsqueeze(-1), self.inner.weight.to(wide), self.inner.bias.to(wide))
                out = nn.functional.linear(hidden.relu(), self.outer.weight.to(wide), self.outer.bias.to(wide))
            return out.movedim(-1, 1)

        return FunctionBias(block)
