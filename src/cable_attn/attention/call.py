"""One attention call, checked: what every backend receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cable_attn.bias import Bias, PotentialBias, ToeplitzBias, TokenBias
from cable_attn.errors import CableError
from cable_attn.layout import Layout

BLOCK_ELEMENTS = 2**26
"""How many scores a backend that works in blocks of rows holds at once (256 MiB in fp32)."""


@dataclass(frozen=True)
class Call:
    q: Tensor  # [B, H, Tq, D]
    k: Tensor  # [B, H_kv, Tk, D]
    v: Tensor  # [B, H_kv, Tk, D_v]
    bias: Bias | None
    layout: Layout
    scale: float
    dropout: float = 0.0
    softcap: float | None = None
    mix: Callable[[Tensor, Tensor | None, Tensor, Tensor], Tensor] | None = None
    prune: float | None = None
    together: Tensor | None = None
    """[B, H + 2 H_kv, T, D]: q, k and v as parts of one tensor, whose gradient then comes in one piece."""
    summaries: tuple[Tensor, Tensor] | None = None
    """Of all complete blocks of keys, as :func:`cable_attn.attention.decoding.summarise` writes them; for pruning."""

    @property
    def wide(self) -> torch.dtype:
        """Scores are never held in half precision."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    def indices(self, rows: range, *, only_visible: bool = False) -> tuple[Tensor, Tensor]:
        """The queries of ``rows`` and the keys, as index tensors; ``only_visible`` leaves out keys past the rows."""
        keys = self.k.shape[2]
        if only_visible and self.layout.causal and isinstance(self.layout.query_start, int):
            keys = rows.stop + self.layout.query_start
        i = torch.arange(rows.start, rows.stop, device=self.q.device)
        return i, torch.arange(keys, device=self.q.device)


def require_four_dimensions(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise CableError(f"q, k, v must be [batch, heads, tokens, dim], got {_shapes(q=q, k=k, v=v)}.")


def check(call: Call) -> None:
    """Raise a :class:`CableError` for tensors that do not fit together."""
    q, k, v, layout = call.q, call.k, call.v, call.layout
    require_four_dimensions(q, k, v)
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise CableError(f"q, k and v do not fit together: {_shapes(q=q, k=k, v=v)}.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise CableError(f"q, k and v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if q.shape[1] % k.shape[1]:
        raise CableError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads.")
    start = layout.query_start
    placed = layout.causal or call.bias is not None or layout.document_ids is not None
    has_places = placed and isinstance(start, int)
    if has_places and not 0 <= start <= k.shape[2] - q.shape[2]:
        raise CableError(
            f"{q.shape[2]} queries from key {start} on do not lie within {k.shape[2]} keys: "
            "each query must stand at a key."
        )
    if layout.window is not None and (not isinstance(layout.window, (int, torch.SymInt)) or layout.window < 1):
        raise CableError(f"window must be a whole number of at least 1, got {layout.window}.")
    if call.bias is not None and not isinstance(call.bias, Bias):
        raise CableError(f"bias must be a Bias, like PotentialBias(c, g), got {type(call.bias).__name__}.")
    for name, value in (("key_mask", layout.key_mask), ("document_ids", layout.document_ids)):
        if value is not None and tuple(value.shape) != (q.shape[0], k.shape[2]):
            raise CableError(f"{name} must be [{q.shape[0]}, {k.shape[2]}] (batch, keys), got {tuple(value.shape)}.")
    if layout.key_mask is not None and layout.key_mask.dtype != torch.bool:
        raise CableError(f"key_mask must be bool (true = a real token), got {layout.key_mask.dtype}.")
    if isinstance(call.bias, ToeplitzBias) and not layout.causal and call.bias.zero == 0 and q.shape[2] > 1:
        raise CableError(
            "the bias knows distances to earlier keys only, and attention is not causal. Make it for both directions "
            "(CableBias(…, causal=False)), or give causal=True."
        )
    if not 0 <= call.dropout < 1:
        raise CableError(f"dropout must lie in [0, 1), got {call.dropout}.")
    if not 0 < abs(call.scale) < float("inf"):
        raise CableError(f"scale must be finite and not 0, got {call.scale}.")
    if call.softcap is not None and call.softcap <= 0:
        raise CableError(f"softcap must be positive, got {call.softcap}.")
    if call.prune is not None:
        _check_prune(call)
    batch, heads, queries, _ = q.shape
    if isinstance(call.bias, TokenBias):
        _check_broadcast("c", call.bias.c, (batch, heads, k.shape[2]), free=0)
        if queries != 1 or call.bias.token.x.shape[:2] != (batch, 1):
            raise CableError(f"a TokenBias is of one new token in each of {batch} texts, got {_shapes(q=q)}.")
    if isinstance(call.bias, PotentialBias):
        _check_broadcast("c", call.bias.c, (batch, heads, k.shape[2]), free=2)
        if call.bias.g is not None:
            _check_broadcast("g", call.bias.g, (batch, heads, queries), free=3)


def _check_prune(call: Call) -> None:
    if not 0 < call.prune < 1:  # type: ignore[operator]
        raise CableError(f"prune must lie between 0 and 1 (the weight that a row may lose), got {call.prune}.")
    if not isinstance(call.bias, (PotentialBias, TokenBias)):
        raise CableError("prune needs a potential bias: only one that falls with distance bounds what lies far away.")
    if call.bias.kernel is not None:
        raise CableError(
            f"prune does not work with the kernel {call.bias.kernel!r} (K-CABLE): it falls too slowly for any key "
            "to be provably negligible. Leave prune out, or use cable."
        )


def _check_broadcast(name: str, value: Tensor, wanted: tuple[int, int, int], free: int) -> None:
    """The first ``free`` dimensions may also be 1."""
    fits = all(size == want or (size == 1 and d < free) for d, (size, want) in enumerate(zip(value.shape, wanted)))
    if not fits:
        raise CableError(
            f"{name} must be {list(wanted)} (batch, query heads, {'keys' if name == 'c' else 'queries'}), "
            f"got {list(value.shape)}."
        )


def _shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def in_row_blocks(call: Call, attend: Callable[[Call, range], Tensor], *, most: int | None = None) -> Tensor:
    """``attend(call, rows)`` for blocks of queries, so that no more than ``BLOCK_ELEMENTS`` scores exist at once.

    In training each block is recomputed in the backward pass, so that this holds there too.
    """
    batch, heads, queries, _ = call.q.shape
    rows = max(BLOCK_ELEMENTS // (batch * heads * call.k.shape[2]), 1)
    if most is not None:
        rows = min(rows, most)
    blocks = [range(first, min(first + rows, queries)) for first in range(0, queries, rows)]
    if len(blocks) == 1:
        return attend(call, blocks[0])
    if torch.is_grad_enabled():
        again = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=call.dropout > 0)
        return torch.cat([again(call, block) for block in blocks], dim=2)
    return torch.cat([attend(call, block) for block in blocks], dim=2)
