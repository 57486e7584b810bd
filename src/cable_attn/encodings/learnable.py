"""Learnable absolute positions (GPT-2, BERT): a table with one vector per position, added to the embeddings.

There is nothing past the end of the table, so a longer text is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cable_attn.encodings.base import Encoding, Geometry
from cable_attn.errors import CableError
from cable_attn.layout import Layout


class Learnable(Encoding):
    """A table (max_length, C), N(0, 0.02)."""

    per_layer = False

    def __init__(self, geometry: Geometry):
        super().__init__(geometry)
        self.table = nn.Parameter(torch.empty(geometry.max_length, geometry.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=0.02)

    def embed(self, x: Tensor, layout: Layout) -> Tensor:
        size = len(self.table)
        # A longer layout may still hold short documents, so look at the positions, unless a GPU would have to wait for
        # it or a graph cannot: there the look-up itself asserts its bounds.
        may_look = (layout.key_length > size or x.device.type == "cpu") and not torch.compiler.is_compiling()
        if may_look and (longest := int(layout.positions.max()) + 1) > size:
            raise CableError(
                f"encoding 'learnable' has a table of {size} positions, but the text has {longest} tokens. "
                "Shorten it, train with a larger max_position_embeddings, or use an encoding that extrapolates (cable)."
            )
        return x + nn.functional.embedding(layout.positions, self.table).to(x.dtype)
