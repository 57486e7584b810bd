"""Where the tokens of one attention call stand, and so which key each query may see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cable_attn.bias import Index, prefix_sum


def numbered(document_ids: Tensor) -> Tensor:
    """Documents counted from 0, whatever their ids are [B, T]."""
    changed = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.nn.functional.pad(changed.cumsum(-1, dtype=torch.int32), (1, 0))


@dataclass
class Layout:
    """Shared by all layers of a forward pass.

    Keys are counted from 0 to ``key_length``, cached ones included; query ``i`` stands at key ``i + query_start``.
    ``key_mask`` [B, Tk] is true for real tokens and false for padding; ``document_ids`` [B, Tk] says which document of
    a pack a token belongs to, and tokens see only their own document (an id that comes back later is another one);
    ``window`` limits the distance to window − 1.
    ``known_positions`` [B or 1, Tq] and ``known_waves`` (RoPE's cosines and sines) spare each layer computing them.
    """

    query_length: int
    key_length: int
    query_start: Index
    device: torch.device
    causal: bool = True
    window: int | None = None
    key_mask: Tensor | None = None
    document_ids: Tensor | None = None
    known_positions: Tensor | None = None
    known_waves: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.document_ids is not None and self.document_ids.dim() == 2 and self.document_ids.shape[1]:
            self.document_ids = numbered(self.document_ids)

    @property
    def is_square(self) -> bool:
        """Every key is also a query: a plain forward pass without a cache."""
        return self.query_length == self.key_length and isinstance(self.query_start, int) and self.query_start == 0

    @property
    def at(self) -> Tensor:
        """The key index of each query [Tq]."""
        return torch.arange(self.query_length, device=self.device) + self.query_start

    @property
    def query_mask(self) -> Tensor | None:
        """``key_mask`` at the queries [B, Tq]."""
        return None if self.key_mask is None else self.key_mask[:, self.at]

    @property
    def _starts(self) -> Tensor | None:
        """[B, Tk], true where a document of a pack begins."""
        if self.document_ids is None:
            return None
        changed = self.document_ids[:, 1:] != self.document_ids[:, :-1]
        return torch.nn.functional.pad(changed, (1, 0), value=True)

    @property
    def query_starts(self) -> Tensor | None:
        """[B, Tq], true for a query that is the first token of its document."""
        return None if self._starts is None else self._starts[:, self.at]

    @property
    def positions(self) -> Tensor:
        """[B or 1, Tq]: the place of each query in its own document, padding not counted."""
        if self.known_positions is not None:
            return self.known_positions
        if self.key_mask is None and self._starts is None:
            return self.at.unsqueeze(0)
        if self.key_mask is not None:
            real = self.key_mask
        else:
            assert self._starts is not None
            real = torch.ones_like(self._starts)
        counted = prefix_sum(real.unsqueeze(1).float(), starts=self._starts).squeeze(1).long()
        return (counted - 1).clamp(min=0)[:, self.at]

    def to(self, device: torch.device) -> Layout:
        """On the device of a layer, if layers lie on several."""
        if device == self.device:
            return self

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        waves = None if self.known_waves is None else (moved(self.known_waves[0]), moved(self.known_waves[1]))
        return replace(
            self, device=device, query_start=moved(self.query_start), key_mask=moved(self.key_mask),
            document_ids=moved(self.document_ids), known_positions=moved(self.known_positions), known_waves=waves,
        )  # fmt: skip

    def of_last_keys(self, count: int) -> Layout:
        """The same queries against the last ``count`` keys only: those before have been forgotten."""
        gone = self.key_length - count
        if not gone:
            return self
        key_mask = None if self.key_mask is None else self.key_mask[:, gone:]
        document_ids = None if self.document_ids is None else self.document_ids[:, gone:]
        start = self.query_start - gone
        return replace(self, key_length=count, query_start=start, key_mask=key_mask, document_ids=document_ids)

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        """Which of the keys ``j`` [m] each of the queries ``i`` [n] sees: bool [B or 1, 1, n, m]."""
        at = (i + self.query_start)[:, None]
        seen = (at >= j) if self.causal else torch.ones_like(at >= j)
        if self.window is not None:
            seen = seen & ((at - j).abs() < self.window)
        seen = seen[None, None]
        if self.key_mask is not None:
            seen = seen & self.key_mask[:, None, None, j]
        if self.document_ids is not None:
            here = self.document_ids[:, at.squeeze(-1)]
            seen = seen & (here[:, None, :, None] == self.document_ids[:, None, None, j])
        return seen
