"""What attention keeps in a Hugging Face cache beside the keys, and where the tokens behind it stand.

The potential of layer l is kept as the keys of one more cache layer, number L + l: [B, H, T, 1] in float64. So the
caches of transformers (dynamic, also offloaded, and static) and everything it does to one (beam reordering, cropping,
repeating) serve the potential too, with no class of our own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, StaticLayer

from cable_attn.attention.decoding import KEY_BLOCK, blank_summaries, summarise
from cable_attn.errors import CableError
from cable_attn.layout import Layout


class CachedPotential:
    """A :class:`~cable_attn.encodings.PotentialMemory` inside ``cache``."""

    def __init__(self, cache: Cache, layer: int, num_layers: int):
        self.cache, self.layer, self.slot = cache, layer, num_layers + layer

    @property
    def is_kept(self) -> bool:
        layers: list[Any] = self.cache.layers
        return self.slot < len(layers) and bool(layers[self.slot].is_initialized)

    def last(self, layout: Layout) -> Tensor | None:
        layer: Any = self.cache.layers[self.slot] if self.slot < len(self.cache.layers) else None
        if layer is None or not layer.is_initialized:
            return None
        c = layer.keys.squeeze(-1)
        if not isinstance(layer, StaticLayer):
            return c[..., -1] if c.shape[-1] else None
        if isinstance(layout.query_start, int):
            return c[..., layout.query_start - 1] if layout.query_start else None
        before = (layout.query_start - 1).clamp(min=0).reshape(1)
        return c.index_select(-1, before).squeeze(-1) * (layout.query_start > 0)

    def append(self, c: Tensor, layout: Layout) -> Tensor:
        while len(self.cache.layers) < self.slot - self.layer:  # one that was made without a config has none yet
            assert self.cache.layer_class_to_replicate is not None
            self.cache.layers.append(self.cache.layer_class_to_replicate())
        layer = _slot(self.cache, self.slot, self.layer)
        new, nothing = c.unsqueeze(-1), c.new_empty(*c.shape, 0)
        if not isinstance(layer, StaticLayer):
            return self.cache.update(new, nothing, self.slot)[0].squeeze(-1)
        if not layer.is_initialized:
            layer.lazy_initialization(new, nothing)
            _count_with(layer, self.cache.layers[self.layer])
        held: Tensor = layer.keys  # type: ignore[assignment]
        held.index_copy_(2, layout.at, new)
        return held.squeeze(-1)

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
    potential), so that they are reordered and repeated with the rest. Of a block that grows anew they are written anew;
    all of them when there is no room for all, or when cropping has left a view of them, which the kernels cannot read.
    """
    layer = _slot(memory.cache, _summary_slot(memory, behind_potentials), memory.layer)
    fits = layer.is_initialized and layer.keys.is_contiguous() and layer.values.is_contiguous()
    fresh = not fits or layer.keys.shape[2] < k.shape[2] // KEY_BLOCK
    if fresh:
        layer.dtype, layer.device, layer.is_initialized = k.dtype, k.device, True
        grows = not isinstance(layer, StaticLayer)
        layer.keys, layer.values = blank_summaries(k, 2 * k.shape[2] if grows else k.shape[2])
        if not grows:
            _count_with(layer, memory.cache.layers[memory.layer])
        if not torch.compiler.is_compiling():  # as transformers does, or there would be no CUDA graphs
            torch._dynamo.mark_static_address(layer.keys)
            torch._dynamo.mark_static_address(layer.values)
    start = layout.query_start
    unknown = start if isinstance(start, Tensor) else None
    place = start if isinstance(start, int) else 0
    summarise(k, layer.keys, layer.values, unknown, place, layout.query_length, fresh)
    return layer.keys, layer.values


def drop_summaries(memory: CachedPotential, behind_potentials: bool) -> None:
    """Keys have come that are not in them: they are made anew when they are wanted again."""
    layers: list[Any] = memory.cache.layers
    slot = _summary_slot(memory, behind_potentials)
    if slot < len(layers) and not torch.compiler.is_compiling():
        layers[slot].is_initialized = False


def _summary_slot(memory: CachedPotential, behind_potentials: bool) -> int:
    return memory.slot + (memory.slot - memory.layer if behind_potentials else 0)


def _slot(cache: Cache, slot: int, layer: int) -> Any:
    """One more layer of the cache, of the kind of that layer."""
    while len(cache.layers) <= slot:
        if cache.offloading and isinstance(cache.layers[layer], StaticLayer):
            raise CableError("a static cache that is offloaded has no place for potentials. Use a dynamic one.")
        cache.layers.append(_blank_copy(cache.layers[layer]))
    return cache.layers[slot]


def _count_with(layer: Any, keys: Any) -> None:
    """A static layer counts what it holds, and is reordered only if that is not nothing: as much as the keys' layer."""
    layer.cumulative_length = keys.cumulative_length


def _blank_copy(layer: Any) -> Any:
    """An empty cache layer of the same kind."""
    if isinstance(layer, StaticLayer):
        if layer.is_sliding:
            raise CableError("a static cache with a sliding window has no place for potentials. Use a dynamic cache.")
        return type(layer)(max_cache_len=layer.max_cache_len)
    if isinstance(layer, DynamicSlidingWindowLayer):
        blank = type(layer)(sliding_window=layer.sliding_window)
        if hasattr(layer, "record_past"):  # so that it can be cropped when the keys can
            blank.record_past = layer.record_past
        return blank
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
    if document_ids is not None and document_ids.shape != (tokens.shape[0], keys):
        raise CableError(
            f"document_ids must be [{tokens.shape[0]}, {keys}], of what the cache holds and the new tokens, got "
            f"{list(document_ids.shape)}."
        )
    if attention_mask is not None and isinstance(seen, int) and attention_mask.shape[-1] < seen + new:
        raise CableError(
            f"attention_mask tells of {attention_mask.shape[-1]} tokens, and there are {seen + new}: those that the "
            "cache holds and the new ones."
        )
    if document_ids is None and attention_mask is None and position_ids is not None and new == keys > 1:
        document_ids = _packed(position_ids.expand(tokens.shape[0], -1))
    layout = Layout(
        query_length=new,
        key_length=keys,
        query_start=seen,
        device=tokens.device,
        causal=causal,
        window=window,
        key_mask=key_mask(attention_mask, keys),
        document_ids=document_ids,
        known_positions=position_ids,
    )
    layout.known_positions = layout.positions  # counted once for all layers
    return layout


def _packed(position_ids: Tensor) -> Tensor | None:
    """The documents of a pack, if positions begin anew, as transformers tells them; a graph always looks for them."""
    goes_on = position_ids[:, 1:] == position_ids[:, :-1] + 1
    if not torch.compiler.is_compiling() and bool(goes_on.all()):
        return None
    return torch.nn.functional.pad((~goes_on).cumsum(-1), (1, 0))


def _recording(device: torch.device) -> bool:
    """Whether this run is turned into a graph, which must hold for other numbers too."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def key_mask(attention_mask: Tensor | None, keys: int) -> Tensor | None:
    """The 2-D mask of transformers as bool [B, Tk], or nothing where it hides nothing."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise CableError(f"attention_mask must be [batch, tokens], got {list(attention_mask.shape)}.")
    mask = attention_mask.bool()
    if mask.shape[1] < keys:
        mask = torch.nn.functional.pad(mask, (0, keys - mask.shape[1]), value=False)
    may_look = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    return None if may_look and bool(mask.all()) else mask.contiguous()  # the kernels take no strides of it
