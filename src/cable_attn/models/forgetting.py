"""A cache that drops keys for good, where the model promises that no later token can feel them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from cable_attn.errors import CableError

LOOKED_AT = 64
"""After so many new tokens a layer is looked through for what can go."""


class _ForgettingLayer(DynamicLayer):
    """Counts what it has seen, and holds the last of it."""

    gone = 0
    checked = 0
    """How much it had seen when it was last looked through."""

    def get_seq_length(self) -> int:
        return super().get_seq_length() + self.gone

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        raise CableError("a forgetting cache cannot go back (assisted decoding, crop): it has dropped keys for good.")

    def reset(self) -> None:
        self.gone = self.checked = 0
        super().reset()
        if self.is_initialized and self.keys is not None and self.values is not None:  # transformers 5.17 keeps zeros
            self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]

    def drop(self, count: int) -> None:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[:, :, count:].clone(), self.values[:, :, count:].clone()
        self.gone += count


class ForgettingCache(Cache):
    """Drops keys that no later token can feel, so that it stops growing where distance always counts.

    With scores |s| ≤ U, a gain of at least γ and at most T tokens in all, a key j with γ (c_t − c_j) > 2U + ln(T/ε)
    weighs less than ε/T of any later token, since that token's own key has no bias. So all that is dropped weighs less
    than ε in each row. Each layer drops for itself what all its heads agree upon.

        model.generate(ids, past_key_values=ForgettingCache(model, epsilon=1e-4))
    """

    def __init__(self, model: Any, epsilon: float = 1e-4, most_tokens: int = 2**20):
        if not 0 < epsilon < 1:
            raise CableError(f"epsilon must lie between 0 and 1 (the weight that a row may lose), got {epsilon}.")
        self.num_layers = model.config.num_hidden_layers
        super().__init__(layers=[_ForgettingLayer() for _ in range(self.num_layers)])
        self.reach = [reach.to(model.device) for reach in _reaches(model, epsilon, most_tokens)]
        self.most_tokens = most_tokens

    def forget(self, layer: int) -> None:
        """Called before a layer's new keys come; looks once in a while."""
        keys: Any = self.layers[layer]
        seen = keys.get_seq_length()
        if seen >= self.most_tokens:
            raise CableError(f"this cache was made for {self.most_tokens} tokens: give it a larger most_tokens.")
        if seen - keys.checked < LOOKED_AT:
            return
        keys.checked = seen
        slot = self.num_layers + layer
        if slot < len(self.layers):
            potential: Any = self.layers[slot]
            c = potential.keys.squeeze(-1)
        else:  # ALiBi, whose potential is the place
            potential = None
            c = torch.arange(keys.keys.shape[2], device=keys.keys.device, dtype=torch.float64)[None, None]
        felt = (c[..., -1:] - c <= self.reach[layer][:, None]).flatten(0, 1).any(0)
        count = int(felt.to(torch.uint8).argmax())
        for held in (keys, potential):
            if held is not None and count:
                held.drop(count)


def _reaches(model: Any, epsilon: float, most_tokens: int) -> list[Tensor]:
    """For each layer how far back, in potential, each head can feel a key [H]; an error where there is no bound."""
    config = model.config
    if getattr(config, "attention_prune", None):
        raise CableError("a forgetting cache does not work with attention_prune: choose one of them.")
    layers = [module for module in model.modules() if hasattr(module, "norms") and hasattr(module, "qkv")]
    if not layers or not config.is_causal:
        raise CableError(f"a {type(model).__name__} has no layers that could forget.")
    found = []
    for layer in layers:
        encoding = layer.encoding if layer.encoding is not None else model.base_model.encoding
        gain = encoding.least_gain() if encoding.prunable else None
        if gain is None:
            raise CableError(
                f"the encoding {config.encoding!r} may let a later token feel any distance, so nothing can be "
                "forgotten for good. Use cable with gain_floor above 0, cable-nw, fox or alibi."
            )
        if layer.norms is None:
            raise CableError("the scores of this model have no useful bound. Train it with qk_norm = true to forget.")
        size = layer.head_dim  # a normalised vector has the length √D; the norms' weights stretch it
        stretch = [float(norm.weight.detach().abs().max()) for norm in layer.norms]
        bound = size**0.5 * stretch[0] * stretch[1] * 1.02  # for the rounding of queries and keys
        found.append((2 * bound + math.log(most_tokens / epsilon)) / gain.double())
    return found
