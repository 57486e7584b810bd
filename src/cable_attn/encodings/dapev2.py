"""DAPEv2: position encoding as convolution over the score maps (Zheng et al., 2024), on top of another bias.

    logits = s + b + Conv(LeakyReLU(Conv(tril [s; b])))

The scores and the inner bias of all heads are the 2H channels of a picture; two 1×3 convolutions along the keys (2H →
32 → H) look at neighbouring keys. What a query cannot see is zero at both layers: a row never depends on later tokens.
It holds the scores by nature, so long texts are evaluated in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cable_attn.bias import Bias
from cable_attn.encodings.base import Encoding, Geometry, PotentialMemory, check_options
from cable_attn.encodings.cable import Cable
from cable_attn.encodings.kerple import KerpleLog
from cable_attn.errors import CableError
from cable_attn.layout import Layout


class DapeV2(Encoding):
    """Any additive encoding, refined by the scores."""

    inner_class: ClassVar[type[Encoding]]

    def __init__(self, geometry: Geometry, *, width: int = 32, inner_options: Mapping[str, Any] | None = None):
        super().__init__(geometry)
        if width < 1:
            raise CableError(f"width must be at least 1, got {width}.")
        check_options(self.inner_class.__name__, self.inner_class, inner_options or {})
        self.inner = self.inner_class(geometry, **(inner_options or {}))
        self.first = nn.Conv2d(2 * geometry.num_heads, width, kernel_size=(1, 3), padding=(0, 1))
        self.second = nn.Conv2d(width, geometry.num_heads, kernel_size=(1, 3), padding=(0, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for convolution in (self.first, self.second):
            nn.init.normal_(convolution.weight, std=0.02)
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)

    def bias(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> Bias | None:
        bias: Bias | None = self.inner(x, layout, memory)
        return bias

    def mix(self, scores: Tensor, bias: Tensor | None, q: Tensor, visible: Tensor) -> Tensor:
        assert bias is not None
        with torch.autocast(scores.device.type, enabled=False):
            picture = torch.cat([scores, bias.expand_as(scores)], dim=1) * visible
            hidden = nn.functional.leaky_relu(_convolve(self.first, picture)) * visible
            return scores + bias + _convolve(self.second, hidden)


def _convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    assert layer.bias is not None
    return nn.functional.conv2d(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype), padding=(0, 1))


class DapeV2Cable(DapeV2):
    """DAPEv2 on CABLE."""

    inner_class = Cable


class DapeV2Kerple(DapeV2):
    """DAPEv2 on Kerple-log."""

    inner_class = KerpleLog
