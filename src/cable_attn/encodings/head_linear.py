"""One number per head from each token, in fp32: what steps and gains are made of.

While a model trains in bfloat16 on a GPU, x is rounded as for every other projection, but the weights are not: the
tensor cores add up products of bfloat16 pieces of them, which is what an fp32 product would give, without a copy of x
in fp32 and at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cable_attn.devices import TRITON, current, kernels_run_on
from cable_attn.encodings.base import Geometry, at_least_float32
from cable_attn.errors import CableError


class HeadLinear(nn.Linear):
    """x [B, T, C] → [B, T, H], in fp32 (fp64 for fp64 models) whatever autocast or the model's dtype say.

    With ``per_head_input`` head h reads only its own slice of x.
    """

    def __init__(self, geometry: Geometry, per_head_input: bool = False):
        if per_head_input and geometry.hidden_size != geometry.num_heads * geometry.head_dim:
            raise CableError(
                f"per_head_input needs hidden_size = heads × head_dim, got {geometry.hidden_size} and "
                f"{geometry.num_heads} × {geometry.head_dim}."
            )
        super().__init__(geometry.head_dim if per_head_input else geometry.hidden_size, geometry.num_heads)
        self.per_head_input = per_head_input

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.per_head_input:
            return _linear(x, self.weight, self.bias).mT
        wide = at_least_float32(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(wide), self.bias.to(wide)
            return torch.einsum("bthd,hd->bth", x.to(wide).unflatten(-1, weight.shape), weight) + bias


def together(first: nn.Module, second: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [B, H, T] of two :class:`HeadLinear` from one pass over x, which is what they cost.

    A layer that something has wrapped or changed (an adapter, a hook, quantisation) is called as it is.
    """
    layers: tuple[Any, ...] = (first, second)
    if not all(_is_plain(layer) for layer in layers):
        return first(x).mT, second(x).mT
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    left, right = _linear(x, weight, bias).split([layer.out_features for layer in layers], dim=1)
    return left, right


def _is_plain(layer: Any) -> bool:
    if type(layer) is not HeadLinear or layer.per_head_input or type(layer.weight) is not nn.Parameter:
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return "forward" not in vars(layer) and not any(hooks)  # accelerate's offloading sets a forward on the instance


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = at_least_float32(x.dtype)
    trains_in_bfloat16 = _trains_in_bfloat16(x)
    with torch.autocast(x.device.type, enabled=False):
        weight, bias = weight.to(wide), bias.to(wide)
        if trains_in_bfloat16:
            return project(x.to(torch.bfloat16).contiguous(), weight.contiguous()) + bias[:, None]
        return nn.functional.linear(x.to(wide), weight, bias).transpose(1, 2).contiguous()


def _trains_in_bfloat16(x: Tensor) -> bool:
    if x.device.type != "cuda" or not torch.is_grad_enabled() or not TRITON:
        return False
    if x.dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda") == torch.bfloat16
    return x.dtype == torch.bfloat16


@torch.library.custom_op("cable_attn::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, T, C] in a low precision times weight [n, C] in fp32, as exact as in fp32: [B, n, T]."""
    from cable_attn.encodings import head_kernels

    with current(x.device):
        return head_kernels.product(x, weight)


@torch.library.custom_op("cable_attn::project_backward", mutates_args=())
def _project_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x, as exact as x is, and of the weight."""
    from cable_attn.encodings import head_kernels

    with current(x.device):
        return head_kernels.gradients(grad.contiguous(), x, weight)


project.register_fake(lambda x, weight: weight.new_empty(x.shape[0], weight.shape[0], x.shape[1]))
_project_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
project.register_autograd(
    lambda ctx, grad: _project_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def may_read(x: Tensor, *layers: nn.Module | None) -> bool:
    """Whether :func:`read` can stand in for these layers."""
    served = (torch.bfloat16, torch.float16) if x.device.type == "cuda" else (torch.float16,)  # the interpreter
    if x.dtype not in served or not kernels_serve(x, *layers):
        return False
    return all(layer is None or layer.weight.dtype == x.dtype for layer in layers)


def read(x: Tensor, step: HeadLinear, strength: HeadLinear | None, floor: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """The steps and gains [B, H, T] of tokens x [B, T, C], with nothing kept for a backward pass. A single kernel:
    behind a short prompt, each one counts."""
    serve: Callable[..., tuple[Tensor, Tensor]] = (
        _steps_and_gains if torch.compiler.is_compiling() else _steps_and_gains_now
    )
    second = (None, None) if strength is None else (strength.weight, strength.bias)
    steps, gains = serve(x, step.weight, step.bias, *second, floor)
    return steps, None if strength is None else gains


def _steps_and_gains_now(
    x: Tensor, step: Tensor, step_bias: Tensor, strength: Tensor | None, strength_bias: Tensor | None, floor: float
) -> tuple[Tensor, Tensor]:
    from cable_attn.encodings import head_kernels

    with current(x.device):
        return head_kernels.steps_and_gains(x.contiguous(), step, step_bias, strength, strength_bias, floor)


_steps_and_gains = torch.library.custom_op("cable_attn::steps_and_gains", _steps_and_gains_now, mutates_args=())


@_steps_and_gains.register_fake
def _(x, step, step_bias, strength, strength_bias, floor):  # type: ignore[no-untyped-def]
    shape = (x.shape[0], step.shape[0], x.shape[1])
    return (x.new_empty(shape, dtype=torch.float32), x.new_empty(0 if strength is None else shape, dtype=torch.float32))


def kernels_serve(x: Tensor, *layers: nn.Module | None) -> bool:
    """Whether kernels may stand in for these layers: nothing learns, and nothing has wrapped or changed them."""
    plain = all(layer is None or _is_plain(layer) for layer in layers)
    return plain and not torch.is_grad_enabled() and kernels_run_on(x.device) and x.dtype != torch.float64
