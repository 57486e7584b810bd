"""T5's relative position bias (Raffel et al., 2020): a learned number per head and bucket of distance.

Causal, 32 buckets, n = i − j: ``n`` itself below 16, else ``16 + ⌊ln(n/16) / ln(128/16) · 16⌋``, at most 31.
Bidirectional: half of the buckets for the keys before the query, half for those after.

``clip=K`` is the plain form of the CABLE paper, ``b_ij = r_min(i−j, K)``: K + 1 numbers, one per distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cable_attn.bias import ToeplitzBias
from cable_attn.encodings.base import Encoding, Geometry, PotentialMemory, distances
from cable_attn.errors import CableError
from cable_attn.layout import Layout


class T5(Encoding):
    """A table (buckets, H), N(0, 0.02)."""

    no_weight_decay = ("table",)

    def __init__(
        self,
        geometry: Geometry,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        clip: int | None = None,
        shared: bool = False,
    ):
        """shared: one table for all layers. clip: one entry per distance up to ``clip`` instead of buckets."""
        super().__init__(geometry)
        if buckets < 4 or buckets % 4 or max_distance <= buckets:
            raise CableError(
                f"buckets must be a multiple of 4 below max_distance, got {buckets} and max_distance={max_distance}."
            )
        if clip is not None and clip < 1:
            raise CableError(f"clip must be at least 1, got {clip}.")
        self.buckets, self.max_distance, self.clip = buckets, max_distance, clip
        sides = 1 if geometry.causal else 2
        self.table = nn.Parameter(torch.empty(buckets if clip is None else sides * clip + 1, geometry.num_heads))
        self.reset_parameters()

    @classmethod
    def serves_all_layers(cls, options: Mapping[str, Any]) -> bool:
        return bool(options.get("shared", False))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def bias(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> ToeplitzBias:
        distance = distances(layout)
        entry = self._clipped(distance) if self.clip is not None else self._bucket(distance)
        table = self.table.to(x.device)  # one table may serve layers on several
        return ToeplitzBias(table.T[:, entry], zero=0 if layout.causal else layout.key_length - 1)

    def _clipped(self, distance: Tensor) -> Tensor:
        lowest = 0 if self.geometry.causal else -self.clip  # type: ignore[operator]
        return (distance.clamp(lowest, self.clip) - lowest).long()

    def _bucket(self, distance: Tensor) -> Tensor:
        buckets, after = self.buckets, torch.zeros_like(distance, dtype=torch.long)
        if not self.geometry.causal:
            buckets //= 2
            after = (distance < 0).long() * buckets
        exact = buckets // 2
        n = distance.abs()
        far = torch.log(n.clamp(min=exact) / exact) / math.log(self.max_distance / exact) * (buckets - exact)
        return after + torch.where(n < exact, n, (exact + far.floor()).clamp(max=buckets - 1)).long()
