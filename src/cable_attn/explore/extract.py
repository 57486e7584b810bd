"""Everything that the page and the figures show of a model on a text, as plain arrays.

A T×T matrix never exists as a whole: attention is computed in blocks of rows, and of each row only the heaviest keys
and its sums over distances stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cable_attn.attention import attention_weights
from cable_attn.attention.call import Call
from cable_attn.bias import Bias, PotentialBias, ToeplitzBias
from cable_attn.errors import CableError
from cable_attn.explore.tokens import KINDS, Tokenised
from cable_attn.models.capture import layer_calls

TOP = 32
"""Keys that are kept of each row of attention."""
LIGHTEST = 1e-3
"""A key with a smaller weight is not kept, even if it is among the first :data:`TOP`."""
FAR = 0.01
"""The effective window is where no more than this share of the weight lies further away."""
MAP = 24
"""Attention is also kept as a map of so many rows and columns, for the small pictures."""
BLOCK = 2**24
LONGEST = 65536
"""Keys are stored as 16-bit numbers."""

Watcher = Callable[[int, int], None]
"""``watch(done, total)``: rows of attention."""


@dataclass
class Looked:
    """A model on a text. L layers, H heads, T tokens."""

    name: str
    encoding: str
    causal: bool
    window: int | None
    """Of sliding-window attention."""
    trained_at: int
    tokens: Tokenised
    form: str
    """How the bias is kept: ``potential`` (steps, gains), ``table`` (table), ``grid`` (grid) or ``none``."""
    mixes: bool
    """The encoding also looks at the scores, so the bias is not all that it adds."""
    kernel: str | None
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    attention_layers: list[int] = field(default_factory=list)

    @property
    def layers(self) -> int:
        return int(self.arrays["windows"].shape[0])

    @property
    def heads(self) -> int:
        return int(self.arrays["windows"].shape[1])


@torch.no_grad()
def look(
    model: Any, tokens: Tokenised, name: str, attention_layers: Sequence[int] = (-1,), watch: Watcher | None = None
) -> Looked:
    """Read the text with the model and keep what can be shown. Layers count from 0, or from the end if negative."""
    if len(tokens.ids) > LONGEST:
        raise CableError(f"the page holds at most {LONGEST} tokens, got {len(tokens.ids)}. Give a smaller --tokens.")
    calls = layer_calls(model.eval(), tokens.ids[None].to(model.device))
    config = model.config
    found = Looked(
        name=name,
        encoding=config.encoding,
        causal=config.is_causal,
        window=config.attention_window,
        trained_at=config.max_position_embeddings,
        tokens=tokens,
        form="none",
        mixes=calls[0].mix is not None,
        kernel=None,
        attention_layers=_chosen(attention_layers, len(calls)),
    )
    _add_bias(found, [call.bias for call in calls], config.num_attention_heads, model.device)
    _add_attention(found, calls, watch)
    if "steps" in found.arrays:
        found.arrays["kind_steps"] = steps_by_kind(found.arrays["steps"], tokens.kinds)
    return found


def _chosen(wanted: Sequence[int], layers: int) -> list[int]:
    for layer in wanted:
        if not -layers <= layer < layers:
            raise CableError(f"the model has no layer {layer}: it has the layers 0 to {layers - 1} (−1 is the last).")
    return sorted({layer % layers for layer in wanted})


def _add_bias(found: Looked, biases: list[Bias | None], heads: int, device: torch.device) -> None:
    length = len(found.tokens.ids)
    first = biases[0]
    if first is None:
        return
    if isinstance(first, PotentialBias) and first.kernel in (None, "log"):  # which the page knows
        found.form, found.kernel = "potential", first.kernel
        parts = [steps_and_gains(bias, heads, length) for bias in biases if isinstance(bias, PotentialBias)]
        found.arrays["steps"] = np.stack([steps for steps, _ in parts])
        found.arrays["gains"] = np.stack([gains for _, gains in parts])
    elif isinstance(first, ToeplitzBias):
        found.form = "table"
        found.arrays["table"] = np.stack(
            [_table(bias, length, found.causal, device) for bias in biases if bias is not None]
        )
    else:
        found.form = "grid"
        places, distances = grid_of(length, found.causal)
        found.arrays["places"], found.arrays["distances"] = places, distances
        found.arrays["grid"] = np.stack(
            [_grid(bias, places, distances, length, device) for bias in biases if bias is not None]
        )


def steps_and_gains(bias: PotentialBias, heads: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """How much distance each token adds and how strongly each query feels it: both [H, T], in fp64."""
    c = bias.c[0].double().expand(heads, length)
    steps = torch.diff(c, prepend=torch.zeros_like(c[:, :1]))
    gains = torch.ones_like(c) if bias.g is None else bias.g[0].double().expand(heads, length)
    return steps.cpu().numpy(), gains.cpu().numpy()


def _table(bias: Bias, length: int, causal: bool, device: torch.device) -> np.ndarray:
    """[H, distances]: from 0 up for a causal model, else from 1 − T to T − 1."""
    keys = torch.arange(length, device=device)
    back = bias.rows(keys[-1:], keys)[0, :, 0].flip(-1)
    if causal:
        return back.double().cpu().numpy()
    ahead = bias.rows(keys[:1], keys)[0, :, 0].flip(-1)
    return torch.cat([ahead[:, :-1], back], dim=-1).double().cpu().numpy()


def grid_of(length: int, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Queries and distances at which a bias of no closed form is kept; between them the page interpolates."""
    places = np.unique(np.round(np.geomspace(1, length, 24)).astype(np.int64)) - 1
    far = np.unique(
        np.concatenate([np.arange(33), np.round(np.geomspace(33, max(length - 1, 33), 96)).astype(np.int64)])
    )
    far = far[far < length]
    return places, far if causal else np.unique(np.concatenate([-far, far]))


def _grid(bias: Bias, places: np.ndarray, distances: np.ndarray, length: int, device: torch.device) -> np.ndarray:
    """[H, places, distances]; a distance that would leave the text takes the value at the nearest place that has it."""
    far = torch.from_numpy(distances).to(device)
    ends = torch.tensor([0, length - 1], device=device)
    at_end = torch.where(far < 0, length - 1, 0)
    nearest = bias.rows(at_end + far, ends)[0]  # [H, distances, 2]
    nearest = torch.where(far < 0, nearest[..., 1], nearest[..., 0])
    rows = []
    for place in torch.from_numpy(places).to(device):
        keys = place - far
        there = bias.rows(place[None], keys.clamp(0, length - 1))[0, :, 0]
        rows.append(torch.where((keys >= 0) & (keys < length), there, nearest))
    return torch.stack(rows, dim=1).double().cpu().numpy()


def _add_attention(found: Looked, calls: list[Call], watch: Watcher | None) -> None:
    length, total = len(found.tokens.ids), len(found.tokens.ids) * len(calls)
    windows, maps, kept = [], [], []
    for layer, call in enumerate(calls):
        sums = _Sums(call.q.shape[1], length)
        for rows in row_blocks(call):
            weights = attention_weights(call, rows)[0]
            sums.add(weights, rows)
            if layer in found.attention_layers:
                kept.append(heaviest(weights, rows))
            if watch is not None:
                watch(layer * length + rows.stop, total)
        windows.append(sums.windows())
        maps.append(sums.picture())
    found.arrays["windows"] = np.stack(windows)
    found.arrays["maps"] = np.stack(maps)
    _add_kept(found, kept)


def row_blocks(call: Call) -> list[range]:
    length = call.q.shape[2]
    rows = max(BLOCK // (call.q.shape[1] * length), 1)
    return [range(first, min(first + rows, length)) for first in range(0, length, rows)]


class _Sums:
    """Sums of one layer's attention weights: over distances, and over the squares of a small map."""

    def __init__(self, heads: int, length: int):
        self.length = length
        self.cells = min(MAP, length)
        self.by_distance = torch.zeros(heads, length, dtype=torch.float64)
        self.squares = torch.zeros(heads, self.cells, self.cells, dtype=torch.float64)
        self.cell = torch.arange(length) * self.cells // length
        self.is_in_cell = torch.nn.functional.one_hot(self.cell, self.cells).float()

    def add(self, weights: Tensor, rows: range) -> None:
        weights = weights.cpu()
        late = weights[:, max(self.length // 2 - rows.start, 0) :]
        if late.shape[1]:
            self._add_distances(late, rows.stop - late.shape[1])
        by_column = weights.float() @ self.is_in_cell
        self.squares.index_add_(1, self.cell[rows.start : rows.stop], by_column.double())

    def _add_distances(self, weights: Tensor, first: int) -> None:
        """Shift each row by one more than the row above, so that equal distances stand in one column."""
        _, n, length = weights.shape
        wide = torch.nn.functional.pad(weights.flip(-1), (0, n)).flatten(1)[:, : n * (length + n - 1)]
        along = wide.unflatten(1, (n, length + n - 1)).sum(1, dtype=torch.float64)
        distance = (torch.arange(length + n - 1) - (length - 1) + first).abs()
        inside = distance < length  # the rest is padding
        self.by_distance.index_add_(1, distance[inside], along[:, inside])

    def windows(self) -> np.ndarray:
        """[H, 2]: the smallest distance beyond which less than 1 % of the weight lies, and less than half."""
        beyond = 1 - self.by_distance.cumsum(1) / self.by_distance.sum(1, keepdim=True)
        found = [(beyond < share).int().argmax(1) for share in (FAR, 0.5)]
        return torch.stack(found, dim=1).numpy()

    def picture(self) -> np.ndarray:
        """[H, cells, cells]: the mean weight that a query of a row gives to all keys of a column."""
        queries = torch.bincount(self.cell, minlength=self.cells)
        return (self.squares / queries[:, None]).numpy()


def heaviest(weights: Tensor, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The heaviest keys of each row [H, n, T]: how many [H, n], their indices and weights, the last key first."""
    found, keys = weights.topk(min(TOP, weights.shape[-1]), dim=-1)
    keys, order = keys.sort(dim=-1, descending=True)
    found = found.gather(-1, order)
    keep = found >= LIGHTEST
    return tuple(part.cpu().numpy() for part in (keep.sum(-1), keys[keep], found[keep]))  # type: ignore[return-value]


def _add_kept(found: Looked, kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """All blocks of all chosen layers as three arrays: counts [layers, H, T], and keys and weights in one row each."""
    heads, length = found.heads, len(found.tokens.ids)
    counts = np.zeros((len(found.attention_layers), heads, length), dtype=np.int64)
    rows: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    layer, at = 0, 0
    for number, keys, weights in kept:
        counts[layer, :, at : at + number.shape[1]] = number
        ends = number.sum(1).cumsum()
        for head, (start, end) in enumerate(zip([0, *ends], ends)):
            rows.setdefault((layer, head), []).append((keys[start:end], weights[start:end]))
        at += number.shape[1]
        if at == length:
            layer, at = layer + 1, 0
    parts = [part for key in sorted(rows) for part in rows[key]]
    found.arrays["counts"] = counts
    found.arrays["keys"] = np.concatenate([keys for keys, _ in parts]) if parts else np.zeros(0, dtype=np.int64)
    found.arrays["weights"] = np.concatenate([weights for _, weights in parts]) if parts else np.zeros(0)


def steps_by_kind(steps: np.ndarray, kinds: list[int]) -> np.ndarray:
    """The mean step of each kind of token [L, H, kinds]; NaN for a kind that does not occur.

    The first token is left out: nothing lies before it, so its step has no effect.
    """
    steps, which = steps[..., 1:], np.asarray(kinds)[1:]
    means = [
        steps[..., which == n].mean(-1) if (which == n).any() else np.full(steps.shape[:2], np.nan)
        for n in range(len(KINDS))
    ]
    return np.stack(means, axis=-1)
