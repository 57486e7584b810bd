"""One attention function; the backends differ in speed and in rounding, never in what they compute."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cable_attn.attention import decoding, fused, materialised, reference, sdpa
from cable_attn.attention.call import Call, check, require_four_dimensions
from cable_attn.bias import Bias, Index
from cable_attn.errors import CableError, require_known
from cable_attn.layout import Layout

BACKENDS: dict[str, ModuleType] = {backend.NAME: backend for backend in (fused, sdpa, reference, materialised)}
"""In the order in which ``auto`` tries them."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    query_start: Index | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    mix: Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor] | None = None,
    prune: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """``softmax(q·k·scale + bias) v`` over the keys that each query may see: [B, H, Tq, D].

    q: [B, H, Tq, D]; k, v: [B, H_kv, Tk, D] with H a multiple of H_kv (grouped-query attention).
    bias: a :class:`~cable_attn.bias.Bias`, for example ``PotentialBias(c, g)``, per query head.
    causal: each query sees the keys up to its own. scale: default ``1/√D``. window: at most window − 1 tokens away.
    key_mask: [B, Tk] bool, false for padding. document_ids: [B, Tk]; tokens see only their own document.
    query_start: the key at which the first query stands; default: the queries are the last of the keys.
    mix: an encoding's ``mix`` hook.
    prune: ε, permission to skip keys that provably carry less than ε of a row's weight in total; the fused backend uses
    it, the others compute everything. backend: ``auto``, or one of :data:`BACKENDS`, which then serves or says why not.

    A query that may see nothing gives zeros.
    """
    layout = _layout(q, k, v, causal, window, key_mask, document_ids, query_start)
    return attend(make_call(q, k, v, bias, layout, scale, dropout, softcap, mix, prune), backend)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    query_start: Index | None = None,
    backend: str = "auto",
    **options: Any,
) -> str:
    """Which backend serves :func:`attention` with the same arguments, and why not another."""
    layout = _layout(q, k, v, causal, window, key_mask, document_ids, query_start)
    chosen, passed = choose(make_call(q, k, v, bias, layout, **options), backend)
    return "\n".join([f"{chosen.NAME} serves this call.", *(f"Not {reason}." for reason in passed)])


def _layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    query_start: Index | None,
) -> Layout:
    require_four_dimensions(q, k, v)
    if query_start is None:
        query_start = k.shape[2] - q.shape[2]
    return Layout(q.shape[2], k.shape[2], query_start, q.device, causal, window, key_mask, document_ids)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    layout: Layout,
    scale: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    mix: Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor] | None = None,
    prune: float | None = None,
    together: Tensor | None = None,
    summaries: tuple[Tensor, Tensor] | None = None,
) -> Call:
    """A checked call, for callers that share one layout between many layers."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(q, k, v, bias, layout, scale, dropout, softcap, mix, prune, together, summaries)
    check(call)
    return call


def attend(call: Call, backend: str = "auto") -> Tensor:
    """Serve a checked call."""
    if not call.q.numel():
        return call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
    chosen = choose(call, backend)[0]
    return chosen.run(call if chosen is fused else decoding.settled(call))


def choose(call: Call, backend: str = "auto") -> tuple[ModuleType, list[str]]:
    """The backend that serves the call, and in words why the ones before it did not."""
    require_known("attention backend", backend, ["auto", *BACKENDS])
    passed: list[str] = []
    for name, candidate in BACKENDS.items():
        if backend not in ("auto", name):
            continue
        reason = candidate.refuses(call)
        if reason is None and backend == "auto":
            reason = candidate.defers(call)
        if reason is None:
            return candidate, passed
        passed.append(f"{name}: {reason}")
    serving = [name for name, candidate in BACKENDS.items() if candidate.refuses(call) is None]
    raise CableError(f"attention backend {passed[0]}. These can serve the call: {', '.join(serving)}.")


def attention_weights(call: Call, rows: range) -> Tensor:
    """What the queries of ``rows`` attend to: [B, H, n, Tk]. For pictures; the fast backends never hold it."""
    with torch.autocast(call.q.device.type, enabled=False):
        return reference.weights(call, rows)


__all__ = ["BACKENDS", "attend", "attention", "attention_weights", "choose", "explain", "make_call"]
