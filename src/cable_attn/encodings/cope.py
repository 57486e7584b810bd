"""CoPE: Contextual Position Encoding (Golovneva et al., 2024).

Positions are counted by gates that depend on the scores ``s_ij = q_i·k_j/√D`` themselves:

    gate_ij = σ(s_ij)        p_ij = min(Σ_{j ≤ k ≤ i} gate_ik, n_pos − 1)
    logits_ij = (q_i·k_j + q_i·e[p_ij]) / √D        e interpolated between its integer rows (zero at first)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cable_attn.encodings.base import Encoding, Geometry
from cable_attn.errors import CableError


class Cope(Encoding):
    """Needs the scores, so only a backend that holds them can serve it."""

    causal_only = True

    def __init__(self, geometry: Geometry, *, n_pos: int = 64):
        super().__init__(geometry)
        if n_pos < 2:
            raise CableError(f"n_pos must be at least 2, got {n_pos}.")
        self.table = nn.Parameter(torch.empty(n_pos, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table)

    def mix(self, scores: Tensor, bias: Tensor | None, q: Tensor, visible: Tensor) -> Tensor:
        gates = scores.sigmoid() * visible
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.table) - 1)
        at_whole = q.to(scores.dtype) @ self.table.T.to(scores.dtype)  # [B, H, n, n_pos]
        below = position.floor().long()
        above = position.ceil().long()
        part = position - below
        return scores + at_whole.gather(-1, below) * (1 - part) + at_whole.gather(-1, above) * part
