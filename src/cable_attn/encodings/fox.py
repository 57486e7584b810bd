"""FoX: the Forgetting Transformer's gate (Lin et al., 2025), the concurrent work that CABLE compares itself with.

    c = −cumsum_t log σ(x W_f + b_f)        b_ij = −(c_i − c_j)

that is, the attention to a key is multiplied by every forget gate between it and the query. No gain.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cable_attn.encodings.base import Geometry, PotentialEncoding
from cable_attn.encodings.head_linear import HeadLinear


class Fox(PotentialEncoding):
    """Forget gates as a potential."""

    prunable = True

    def __init__(self, geometry: Geometry):
        super().__init__(geometry)
        self.forget = HeadLinear(geometry)

    def least_gain(self) -> Tensor:
        return torch.ones(self.geometry.num_heads)

    def steps(self, x: Tensor) -> Tensor:
        return -nn.functional.logsigmoid(self.forget(x).mT)
