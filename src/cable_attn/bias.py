"""What an encoding adds to the attention scores, and the accurate sum behind it.

A :class:`Bias` has a definition, ``rows``: the exact values of any block of the score matrix. Tests, pictures and the
plain backends use it. :class:`PotentialBias` also has a fast form, ``b_ij = κ(−g_i |c_i − c_j|)``, from which a
backend can work without ever holding a T×T tensor.

Shapes: B batch, H query heads, Tq queries, Tk keys. Query ``i`` stands at key index ``i + query_start``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cable_attn.devices import widest
from cable_attn.errors import CableError, require_known

Index = int | Tensor
"""A position that may be known only on the device (a static cache under ``torch.compile``)."""

KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "log": lambda b: -torch.log1p(b * b),
}
"""κ by name: what is applied to ``−g_i |c_i − c_j|``. No kernel means the identity."""


class Bias(ABC):
    """Numbers that are added to the scores ``q·k·scale`` before the softmax."""

    @abstractmethod
    def rows(self, i: Tensor, j: Tensor, query_start: Index = 0) -> Tensor:
        """The bias of the queries ``i`` [n] and the keys ``j`` [m]: [B or 1, H or 1, n, m], fp32 or fp64."""


@dataclass(frozen=True)
class PotentialBias(Bias):
    """``b_ij = κ(−g_i |c_i − c_j|)``: CABLE, K-CABLE, ALiBi and FoX are all of this form.

    c: the potential [B, H, Tk], non-decreasing inside a document, float64 or float32 (see :func:`prefix_sum`).
    g: the gain [B, H, Tq] (Tq may be 1 if it is the same for all queries), float32 or float64; ``None`` means 1.
    kernel: ``None`` or a name in :data:`KERNELS`.

    The batch and head dimensions may be 1. Both tensors are per *query* head, also under grouped-query attention.
    """

    c: Tensor
    g: Tensor | None = None
    kernel: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("c", self.c), ("g", self.g)):
            if value is None and name == "g":
                continue
            if not isinstance(value, Tensor) or value.dim() != 3:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise CableError(f"{name} must be a tensor [batch, heads, tokens], got {shape}.")
            if value.dtype not in (torch.float64, torch.float32):
                raise CableError(
                    f"{name} must be float64 or float32, got {value.dtype}: half precision loses whole units of "
                    "distance. Compute it from float32 steps with cable_attn.prefix_sum."
                )
        if self.kernel is not None:
            require_known("bias kernel", self.kernel, KERNELS)

    def rows(self, i: Tensor, j: Tensor, query_start: Index = 0) -> Tensor:
        at = i + query_start
        distance = self.c[..., at].unsqueeze(-1) - self.c[..., j].unsqueeze(-2)
        # The sign comes from the order of the tokens, not from abs(): ReLU makes exact ties, where abs has no gradient.
        distance = torch.where(at[:, None] >= j, distance, -distance)
        if self.g is None:
            b = -distance
        else:
            g = self.g if self.g.shape[-1] == 1 else self.g[..., i]
            b = -g.unsqueeze(-1) * distance
        return KERNELS[self.kernel](b) if self.kernel else b


class NewToken(NamedTuple):
    """What the step and the gain of one token x [B, 1, C] are made of: weights [H, C] and biases [H]."""

    x: Tensor
    step: Tensor
    step_bias: Tensor
    strength: Tensor | None
    strength_bias: Tensor | None
    floor: float
    """Is added to the gain; without a strength there is none."""


@dataclass(frozen=True)
class TokenBias(Bias):
    """The potential bias of one new token whose step and gain are still to be made: the kernel that attends can make
    them on its way.

    c: the stored potential [B, H, Tk], into which the token's is written where its query stands. key_mask: [B, Tk]; a
    token that is not real adds nothing.
    """

    c: Tensor
    token: NewToken
    key_mask: Tensor | None = None
    kernel: str | None = None

    def settled(self, place: Index) -> PotentialBias:
        """The same, made now; it may be made again."""
        x, step, step_bias, strength, strength_bias, floor = self.token
        at = torch.as_tensor(place, device=self.c.device).reshape(1)
        with torch.autocast(x.device.type, enabled=False):
            added = _projected(x, step, step_bias).relu()
            gain = None
            if strength is not None and strength_bias is not None:
                gain = torch.nn.functional.softplus(_projected(x, strength, strength_bias)) + floor
        if self.key_mask is not None:
            added = added * self.key_mask.index_select(1, at).unsqueeze(1)
        before = torch.where(at > 0, self.c.index_select(2, (at - 1).clamp(min=0)), 0.0)
        self.c.index_copy_(2, at, before + added.to(self.c.dtype))
        return PotentialBias(self.c, gain, self.kernel)

    def rows(self, i: Tensor, j: Tensor, query_start: Index = 0) -> Tensor:
        return self.settled(query_start).rows(i, j, query_start)


def _projected(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.float(), weight.float(), bias.float()).transpose(1, 2)


@dataclass(frozen=True)
class ToeplitzBias(Bias):
    """``b_ij = table[h, zero + i − j]``: the same at every place of the text. Distances off the table take its end."""

    table: Tensor  # [H, distances]
    zero: int = 0

    def rows(self, i: Tensor, j: Tensor, query_start: Index = 0) -> Tensor:
        entry = (i + query_start)[:, None] - j + self.zero
        return self.table[:, entry.clamp(0, self.table.shape[-1] - 1)].unsqueeze(0)


@dataclass(frozen=True)
class FunctionBias(Bias):
    """Anything else: ``function(i, j, query_start)`` computes a block of the bias when it is needed."""

    function: Callable[[Tensor, Tensor, Index], Tensor]

    def rows(self, i: Tensor, j: Tensor, query_start: Index = 0) -> Tensor:
        return self.function(i, j, query_start)


@torch.library.custom_op("cable_attn::running_sum", mutates_args=())
def _running_sum(steps: Tensor) -> Tensor:
    """An operator that torch.compile leaves alone: some versions of inductor break on a cumsum under autocast."""
    return steps.contiguous().cumsum(-1)


_running_sum.register_fake(lambda steps: steps.new_empty(steps.shape))
_running_sum.register_autograd(lambda ctx, grad: _running_sum(grad.flip(-1)).flip(-1))


def prefix_sum(steps: Tensor, *, starts: Tensor | None = None, initial: Tensor | None = None) -> Tensor:
    """The running sum over the last dimension, accumulated and returned in float64.

    steps: [B, H, T]. starts: [B, T] bool, true where a new document begins; the sum restarts there, so that the
    first token of a document holds its own step only. initial: [B, H], the sum of what came before ``steps``.

    In float32 the sum itself would cost 4e-3 at 131k tokens; in float64 ``c_i − c_j`` stays exact to float32 rounding
    at any length that fits in memory.
    """
    wide = widest(steps.device)
    steps = steps.to(wide)
    total = _running_sum(steps) if torch.compiler.is_compiling() else steps.cumsum(-1)
    if initial is not None:
        total = total + initial.to(wide).unsqueeze(-1)
    if starts is None:
        return total
    index = torch.arange(steps.shape[-1], device=steps.device)
    latest = torch.where(starts, index, -1).cummax(-1).values.unsqueeze(-2)  # [B, 1, T], −1 before the first start
    before = (total - steps).gather(-1, latest.clamp(min=0).expand_as(total))
    return total - torch.where(latest >= 0, before, 0.0)
