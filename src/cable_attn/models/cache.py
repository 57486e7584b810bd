"""The potential in a Hugging Face cache.

The potential of layer l is kept as the keys of one more cache layer, number L + l: [B, H, T, 1] in float64. So every
cache that transformers has (dynamic, static, offloaded) and everything it does to one (beam reordering, cropping,
repeating) serves the potential too, with no class of our own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from cable_attn.attention.decoding import KEY_BLOCK, blank_summaries, summarise
from cable_attn.layout import Layout


class CachedPotential:
    """A :class:`~cable_attn.encodings.PotentialMemory` inside ``cache``."""

    def __init__(self, cache: Cache, layer: int, num_layers: int):
        self.cache, self.layer, self.slot = cache, layer, num_layers + layer

    def last(self, layout: Layout) -> Tensor | None:
        layer: Any = self.cache.layers[self.slot] if self.slot < len(self.cache.layers) else None
        if layer is None or not layer.is_initialized:
            return None
        c = layer.keys.squeeze(-1)
        if isinstance(layout.query_start, int):
            return c[..., layout.query_start - 1] if layout.query_start else None
        before = (layout.query_start - 1).clamp(min=0).reshape(1)
        return c.index_select(-1, before).squeeze(-1) * (layout.query_start > 0)

    def append(self, c: Tensor, layout: Layout) -> Tensor:
        while len(self.cache.layers) <= self.slot:
            self.cache.layers.append(_blank_copy(self.cache.layers[self.layer]))
        layer: Any = self.cache.layers[self.slot]
        if isinstance(layer, StaticLayer) and layer.is_initialized:  # where the queries stand, not where it counts to
            held: Tensor = layer.keys  # type: ignore[assignment]
            held.index_copy_(2, layout.at, c.unsqueeze(-1))
            return held.squeeze(-1)
        keys, _ = self.cache.update(c.unsqueeze(-1), c.new_empty(*c.shape, 0), self.slot)
        return keys.squeeze(-1)

    def room(self, layout: Layout) -> Tensor | None:
        layer: Any = self.cache.layers[self.slot] if self.slot < len(self.cache.layers) else None
        if layout.query_length > 1 or not isinstance(layout.query_start, Tensor) or layer is None:
            return None
        return layer.keys.squeeze(-1) if layer.is_initialized else None


def cached_summaries(
    memory: CachedPotential, k: Tensor, layout: Layout, behind_potentials: bool
) -> tuple[Tensor, Tensor]:
    """Of all complete blocks of the cached keys ``k``, for pruning; those that the new keys complete are added.

    They are the keys and values of yet another cache layer, number 2 L + l (L + l for an encoding that keeps no
    potential), so that they are reordered and repeated with the rest. Cropping may shorten them, never change one: of
    a block that grows anew they are written anew, and all of them when there is no room for all.
    """
    cache, slot = memory.cache, memory.slot + (memory.slot - memory.layer if behind_potentials else 0)
    while len(cache.layers) <= slot:
        cache.layers.append(_blank_copy(cache.layers[memory.layer]))
    layer: Any = cache.layers[slot]
    fresh = not layer.is_initialized or layer.keys.shape[2] < k.shape[2] // KEY_BLOCK
    if fresh:
        layer.dtype, layer.device, layer.is_initialized = k.dtype, k.device, True
        grows = not isinstance(layer, StaticLayer)
        layer.keys, layer.values = blank_summaries(k, 2 * k.shape[2] if grows else k.shape[2])
        if not torch.compiler.is_compiling():  # as transformers does, or there would be no CUDA graphs
            torch._dynamo.mark_static_address(layer.keys)
            torch._dynamo.mark_static_address(layer.values)
    start = layout.query_start
    unknown = start if isinstance(start, Tensor) else None
    place = start if isinstance(start, int) else 0
    summarise(k, layer.keys, layer.values, unknown, place, layout.query_length, fresh)
    return layer.keys, layer.values


def _blank_copy(layer: Any) -> Any:
    """An empty cache layer of the same kind."""
    if isinstance(layer, StaticLayer):
        return type(layer)(max_cache_len=layer.max_cache_len)
    return type(layer)()


def make_layout(
    tokens: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    cache: Cache | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Layout:
    """The layout of ``tokens`` [B, Tq, C] behind what the cache holds."""
    new = tokens.shape[1]
    seen: int | Tensor = 0 if cache is None else cache.get_seq_length()
    if isinstance(seen, Tensor):
        # A static cache counts on in place. To read a text it pays to wait for the number: more backends serve it.
        seen = int(seen) if new > 1 and not _recording(seen.device) else seen.clone()
    keys = new if cache is None else cache.get_mask_sizes(new, 0)[0]
    layout = Layout(
        query_length=new,
        key_length=keys,
        query_start=seen,
        device=tokens.device,
        causal=causal,
        window=window,
        key_mask=_key_mask(attention_mask, keys),
        document_ids=document_ids,
        known_positions=position_ids,
    )
    layout.known_positions = layout.positions  # counted once for all layers
    return layout


def _recording(device: torch.device) -> bool:
    """Whether this run is turned into a graph, which must hold for other numbers too."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _key_mask(attention_mask: Tensor | None, keys: int) -> Tensor | None:
    """The 2-D mask of transformers as bool [B, Tk], or nothing where it hides nothing."""
    if attention_mask is None:
        return None
    mask = attention_mask.bool()
    if mask.shape[1] < keys:
        mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[1]), value=False)
    may_look = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return None if may_look and bool(mask.all()) else mask
