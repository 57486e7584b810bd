"""Sinusoidal absolute positions (Vaswani et al., 2017), added to the embeddings and computed for any position:

    PE(t, 2k) = sin(t / 10000^(2k/C))        PE(t, 2k+1) = cos(t / 10000^(2k/C))

Its authors multiply the token embeddings by √C first. GPT-2 and BERT do not, and then waves of size 1 drown embeddings
of size 0.02 until training has grown them: ``scale_tokens`` brings the factor back, which matters for short runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cable_attn.encodings.base import Encoding, Geometry, at_least_float32
from cable_attn.layout import Layout


class Sinusoidal(Encoding):
    """Fixed waves."""

    per_layer = False

    def __init__(self, geometry: Geometry, *, scale_tokens: bool = False):
        super().__init__(geometry)
        self.scale_tokens = scale_tokens

    def embed(self, x: Tensor, layout: Layout) -> Tensor:
        width, wide = x.shape[-1], at_least_float32(x.dtype)
        exponent = torch.arange(0, width, 2, device=x.device, dtype=wide) / width
        angle = layout.positions.to(wide).unsqueeze(-1) * 10000.0**-exponent
        waves = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :width]
        return (x * width**0.5 if self.scale_tokens else x) + waves.to(x.dtype)
