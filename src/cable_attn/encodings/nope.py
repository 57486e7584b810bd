"""NoPE: no position encoding at all (Haviv et al., 2022; Kazemnejad et al., 2023).

A causal model can tell positions from the mask alone. A bidirectional one sees a bag of tokens.
"""

from __future__ import annotations

from cable_attn.encodings.base import Encoding


class Nope(Encoding):
    """Nothing, nowhere."""

    per_layer = False
