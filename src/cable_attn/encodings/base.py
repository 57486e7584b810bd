"""What every encoding is: hooks at the four places where position can enter a transformer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from cable_attn.bias import Bias, PotentialBias, TokenBias, prefix_sum
from cable_attn.errors import CableError, unknown
from cable_attn.layout import Layout


@dataclass(frozen=True)
class Geometry:
    """What an encoding may know of the model that it serves."""

    hidden_size: int
    num_heads: int
    head_dim: int
    max_length: int
    """The training length: the size of a learnable table, and where scaled RoPE starts to stretch."""
    causal: bool = True


class PotentialMemory(Protocol):
    """Where the potential of earlier tokens is kept while decoding."""

    def last(self, layout: Layout) -> Tensor | None:
        """The potential of the token before the queries [B, H], if there is one."""

    def append(self, c: Tensor, layout: Layout) -> Tensor:
        """Store the queries' potential [B, H, Tq] and return that of all keys [B, H, Tk]."""

    def room(self, layout: Layout) -> Tensor | None:
        """That of all keys [B, H, Tk], to be written in place, if it holds it already and there is one new token."""


class Encoding(nn.Module):
    """The base class does nothing, anywhere: it is NoPE. A subclass overrides the hook of the place where it acts.

    Options are the keyword-only arguments of ``__init__``.
    """

    per_layer: ClassVar[bool] = True
    """Each layer learns its own; otherwise one instance serves the whole model."""
    causal_only: ClassVar[bool] = False
    """Has no meaning when a token can see those after it."""
    prunable: ClassVar[bool] = False
    """Its bias is a potential's and falls without end, so that ``prune=ε`` may skip what lies far away."""
    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    """Parameters with two or more dimensions that are scalars in spirit (a table of biases)."""

    mix: Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor] | None = None
    """``mix(scores, bias, q, visible) → scores``, for encodings that need the scores themselves. ``scores``, ``bias``
    and ``visible`` are [B, H, n, Tk] (the last two broadcast); ``q`` [B, H, n, D] carries the softmax scale already."""

    def __init__(self, geometry: Geometry):
        super().__init__()
        self.geometry = geometry

    def embed(self, x: Tensor, layout: Layout) -> Tensor:
        """Token embeddings [B, Tq, C], before the first layer."""
        return x

    def rotate(self, q: Tensor, k: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """The new tokens' queries [B, H, Tq, D] and keys [B, H_kv, Tq, D], before keys are cached."""
        return q, k

    def bias(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> Bias | None:
        """What is added to the scores. ``x`` [B, Tq, C] is what the layer's attention reads."""
        return None

    def forward(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> Bias | None:
        """:meth:`bias`, as a call that hooks and wrappers of modules take part in."""
        return self.bias(x, layout, memory)

    def least_gain(self) -> Tensor | None:
        """What a unit of potential takes from any token's scores at least [H]; ``None``: it may be nothing."""
        return None

    def reset_parameters(self) -> None:
        """Initialise what is the encoding's own; its sub-modules initialise themselves."""

    @classmethod
    def serves_all_layers(cls, options: Mapping[str, Any]) -> bool:
        return not cls.per_layer


class PotentialEncoding(Encoding):
    """A bias ``κ(−g_i |c_i − c_j|)`` whose potential c is the running sum of a step that each token adds."""

    kernel: ClassVar[str | None] = None

    def steps(self, x: Tensor) -> Tensor:
        """How much distance each token adds [B, H, Tq], at least 0."""
        raise NotImplementedError

    def gain(self, x: Tensor) -> Tensor | None:
        """How strongly each query feels distance [B, H, Tq]; ``None`` means 1."""
        return None

    def steps_and_gain(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both, for an encoding that has them cheaper together."""
        return self.steps(x), self.gain(x)

    def bias(self, x: Tensor, layout: Layout, memory: PotentialMemory | None = None) -> PotentialBias | TokenBias:
        steps, gain = self.steps_and_gain(x)
        if layout.query_mask is not None:
            steps = steps * layout.query_mask.unsqueeze(1)
        initial = memory.last(layout) if memory is not None else None
        c = prefix_sum(steps, starts=layout.query_starts, initial=initial)
        if memory is not None:
            c = memory.append(c, layout)
        return PotentialBias(c, gain, self.kernel)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def distances(layout: Layout) -> Tensor:
    """Every distance i − j that the layout holds, in the order of :class:`~cable_attn.bias.ToeplitzBias`: fp32 [n]."""
    first = 0 if layout.causal else 1 - layout.key_length
    return torch.arange(first, layout.key_length, device=layout.device, dtype=torch.float32)


def option_names(encoding: type[Encoding]) -> list[str]:
    parameters = inspect.signature(encoding.__init__).parameters.values()
    return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def check_options(name: str, encoding: type[Encoding], options: Mapping[str, Any]) -> None:
    """Raise an error that names the nearest option for one that ``encoding`` does not have, or what it must be."""
    hints = get_type_hints(encoding.__init__)
    for option, value in options.items():
        if option not in option_names(encoding):
            raise unknown(f"option of encoding {name!r}", option, option_names(encoding))
        kinds = [get_origin(kind) or kind for kind in get_args(hints[option]) or (hints[option],)]
        is_whole = type(value) is int and float in kinds
        if not is_whole and (not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise CableError(f"option {option} of encoding {name!r} must be {wanted}, got {value!r}.")
