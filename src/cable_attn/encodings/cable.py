"""CABLE: Context-aware Biases for Length Extrapolation (Veisi, Amirzadeh and Mansourian, 2025).

Each token adds a distance that is learned from its content, and each query learns how strongly it feels distance:

    f = ReLU(x W_c + b_c)         the step, one number per head and token
    c = cumsum_t f                the potential
    g = Softplus(x W_s + b_s)     the gain
    b_ij = −g_i |c_i − c_j|       causal: the keys are at j ≤ i, so the distance is c_i − c_j

CABLE_NW has no gain (g ≡ 1). K-CABLE bends the bias with a kernel, ``−log(1 + b_ij²)``, for models with few layers.
With f ≡ 1 and a constant gain per head it is ALiBi.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from cable_attn.bias import NewToken, PotentialBias, TokenBias
from cable_attn.encodings.alibi import slopes
from cable_attn.encodings.base import Geometry, PotentialEncoding, PotentialMemory
from cable_attn.encodings.head_linear import HeadLinear, kernels_serve, may_read, read, together
from cable_attn.errors import CableError, require_known
from cable_attn.layout import Layout

INITS = ("paper", "spread")


def _fill(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter, unless transformers has just loaded it from a checkpoint."""
    if not getattr(parameter, "_is_hf_initialized", False):
        with torch.no_grad():
            parameter.copy_(values)


class LearnedDistance(PotentialEncoding):
    """Steps that are learned from the tokens, and perhaps a gain: what all of them have in common."""

    prunable = True

    def __init__(self, geometry: Geometry, init: str, per_head_input: bool, *, has_gain: bool, gain_floor: float = 0.0):
        super().__init__(geometry)
        require_known("init", init, INITS)
        self.init, self.gain_floor = init, gain_floor
        self.step = HeadLinear(geometry, per_head_input)
        self.strength = HeadLinear(geometry, per_head_input) if has_gain else None
        self.reset_parameters()

    def steps(self, x: Tensor) -> Tensor:
        return self.step(x).mT.relu()

    def gain(self, x: Tensor) -> Tensor | None:
        return None if self.strength is None else nn.functional.softplus(self.strength(x).mT) + self.gain_floor

    @property
    def _is_as_here(self) -> bool:
        """No subclass has another idea of steps and gains: then they may be made together, and by kernels."""
        return type(self).steps is LearnedDistance.steps and type(self).gain is LearnedDistance.gain

    def steps_and_gain(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._is_as_here and may_read(x, self.step, self.strength):
            return read(x, self.step, self.strength, self.gain_floor)
        if not self._is_as_here or self.strength is None:
            return super().steps_and_gain(x)
        steps, strength = together(self.step, self.strength, x)
        return steps.relu(), nn.functional.softplus(strength) + self.gain_floor

    def bias(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> PotentialBias | TokenBias:
        return self._of_new_token(x, layout, memory) or super().bias(x, layout, memory)

    def _of_new_token(self, x: Tensor, layout: Layout, memory: PotentialMemory | None) -> TokenBias | None:
        """The bias of one new token behind a cache of fixed size, for the kernel that attends to make."""
        room = memory.room(layout) if memory is not None else None
        served = self._is_as_here and layout.document_ids is None and kernels_serve(x, self.step, self.strength)
        if room is None or not served:
            return None
        weight, bias = (None, None) if self.strength is None else (self.strength.weight, self.strength.bias)
        token = NewToken(x.contiguous(), self.step.weight, self.step.bias, weight, bias, self.gain_floor)
        return TokenBias(room, token, layout.key_mask, self.kernel)


class CableNW(LearnedDistance):
    """CABLE without the gain."""

    def __init__(self, geometry: Geometry, *, init: str = "paper", per_head_input: bool = False):
        """init: ``paper`` starts every head with the same short window (weights N(0, 0.02), biases 0); ``spread``
        spreads the heads over time scales, as ALiBi's slopes do. per_head_input: head h reads only its slice of x."""
        super().__init__(geometry, init, per_head_input, has_gain=False)

    def reset_parameters(self) -> None:
        if self.init == "spread":
            slope = slopes(self.geometry.num_heads, self.step.bias.device)
            self.step.reset_parameters()
            _fill(self.step.weight, self.step.weight * slope[:, None])
            _fill(self.step.bias, slope)

    def least_gain(self) -> Tensor:
        return torch.ones(self.geometry.num_heads)


class Cable(LearnedDistance):
    """The whole method."""

    strength: HeadLinear

    def __init__(
        self, geometry: Geometry, *, init: str = "paper", per_head_input: bool = False, gain_floor: float = 0.0
    ):
        """init and per_head_input: as for :class:`CableNW`. gain_floor: added to the gain, so that distance always
        counts and a cache may forget for good."""
        if not (gain_floor >= 0 and math.isfinite(gain_floor)):
            raise CableError(f"gain_floor must be a number of at least 0, got {gain_floor!r}.")
        super().__init__(geometry, init, per_head_input, has_gain=True, gain_floor=gain_floor)

    def reset_parameters(self) -> None:
        if self.init == "spread":
            slope = slopes(self.geometry.num_heads, self.step.bias.device)
            _fill(self.step.bias, torch.ones_like(slope))
            _fill(self.strength.bias, slope.expm1().log())

    def least_gain(self) -> Tensor | None:
        return torch.full((self.geometry.num_heads,), self.gain_floor) if self.gain_floor else None


class KCable(Cable):
    """CABLE through the kernel ``−log(1 + b²)``: a slower fall, so that few layers can still look far."""

    kernel: ClassVar[str | None] = "log"
    prunable = False
