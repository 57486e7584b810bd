"""RoPE: Rotary Position Embedding (Su et al., 2021), and three ways to stretch it.

Pairs (k, k + D/2) of each query and key are turned by ``t · θ_k``, ``θ_k = base^(−2k/D)``, so that their product
depends on the distance only. To read past the training length L by a factor s:

    linear    positions are divided by s (Chen et al., 2023)
    ntk       base ← base · s^(D/(D−2)): fast waves stay, slow ones stretch
    yarn      waves that turn more than 32 times in L stay, those that turn less than once are divided by s, a ramp lies
              between; cos and sin are multiplied by 0.1 ln s + 1 (Peng et al., 2023)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cable_attn.devices import widest
from cable_attn.encodings.base import Encoding, Geometry, at_least_float32
from cable_attn.errors import CableError, require_known
from cable_attn.layout import Layout

SCALINGS = ("none", "linear", "ntk", "yarn")


class Rope(Encoding):
    """Rotated queries and keys; the angles are always computed in fp32 or better."""

    per_layer = False

    def __init__(self, geometry: Geometry, *, base: float = 10000.0, scaling: str = "none", factor: float = 1.0):
        """scaling: ``none``, ``linear``, ``ntk`` or ``yarn``; factor: how many times the training length to reach."""
        super().__init__(geometry)
        require_known("scaling", scaling, SCALINGS)
        if geometry.head_dim % 2:
            raise CableError(
                f"encoding 'rope' turns pairs, so the head dimension must be even, got {geometry.head_dim}."
            )
        if not (math.isfinite(base) and base > 1):
            raise CableError(f"base must be above 1, got {base!r}.")
        if not (math.isfinite(factor) and factor >= 1):
            raise CableError(f"factor must be at least 1, got {factor!r}.")
        if scaling == "ntk" and geometry.head_dim < 4:
            raise CableError(f"scaling 'ntk' wants a head dimension of at least 4, got {geometry.head_dim}.")
        if scaling == "none" and factor != 1:
            raise CableError(f"factor={factor!r} needs a scaling: {', '.join(SCALINGS[1:])}.")
        self.base, self.scaling, self.factor = base, scaling, factor

    def frequencies(self, device: torch.device) -> Tensor:
        """θ_k [D/2]."""
        dim, base = self.geometry.head_dim, self.base
        if self.scaling == "ntk":
            base = base * self.factor ** (dim / (dim - 2))
        theta = base ** -(torch.arange(0, dim, 2, device=device, dtype=widest(device)) / dim)
        if self.scaling == "linear":
            return theta / self.factor
        if self.scaling == "yarn":
            stay = self._yarn_ramp(device)
            return theta * stay + theta / self.factor * (1 - stay)
        return theta

    def _yarn_ramp(self, device: torch.device, fast: float = 32, slow: float = 1) -> Tensor:
        """1 for waves that turn at least ``fast`` times within the training length, 0 below ``slow`` turns."""
        dim = self.geometry.head_dim

        def wave_that_turns(times: float) -> float:
            return dim * math.log(self.geometry.max_length / (times * 2 * math.pi)) / (2 * math.log(self.base))

        low = max(math.floor(wave_that_turns(fast)), 0)
        high = min(math.ceil(wave_that_turns(slow)), dim - 1)
        index = torch.arange(dim // 2, device=device, dtype=widest(device))
        return 1 - ((index - low) / max(high - low, 1e-3)).clamp(0, 1)

    def embed(self, x: Tensor, layout: Layout) -> Tensor:
        layout.known_waves = self._cos_and_sin(x.dtype, layout)  # computed once for all layers
        return x

    def rotate(self, q: Tensor, k: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        cos, sin = layout.known_waves or self._cos_and_sin(q.dtype, layout)
        return _turn(q, cos, sin), _turn(k, cos, sin)

    def _cos_and_sin(self, dtype: torch.dtype, layout: Layout) -> tuple[Tensor, Tensor]:
        waves = torch.ops.cable_attn.waves if torch.compiler.is_compiling() else _waves
        exact = waves(layout.positions, self.frequencies(layout.device))
        cos, sin = (wave.to(at_least_float32(dtype)) for wave in exact)
        if self.scaling == "yarn":
            grow = 0.1 * math.log(self.factor) + 1
            cos, sin = cos * grow, sin * grow
        return cos, sin


def _waves(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of ``t · θ``: [B or 1, 1, Tq, D], in the precision of the frequencies."""
    angle = positions.unsqueeze(-1) * frequencies
    angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
    return angle.cos(), angle.sin()


# An operator that torch.compile leaves alone: it would compute these fp64 waves anew for every head and every text.
_operator = torch.library.custom_op("cable_attn::waves", _waves, mutates_args=())


@_operator.register_fake
def _(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], 1, positions.shape[1], 2 * frequencies.shape[0])
    return frequencies.new_empty(shape), frequencies.new_empty(shape)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).to(x.dtype)
