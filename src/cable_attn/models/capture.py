"""What each layer of a model asks of attention, for pictures and measurements."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cable_attn.attention.call import Call
from cable_attn.errors import CableError
from cable_attn.models.layers import SelfAttention


def layer_calls(model: PreTrainedModel, ids: Tensor) -> list[Call]:
    """The attention calls of all layers, in order, for the token ids [B, T]."""
    found: list[Call] = []

    def note(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        found.append(layer.call(given["x"], given["layout"], given.get("shared_encoding")))

    layers = [layer for layer in model.modules() if isinstance(layer, SelfAttention)]
    if not layers:
        raise CableError(
            f"a {type(model).__name__} is not a model of this package, so its layers cannot be looked into. Give a "
            "checkpoint of cable train, or bring yours over with from_gpt2 or from_bert."
        )
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            model.base_model(ids, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    finally:
        for hook in hooks:
            hook.remove()
    return found
