"""Still figures of what an encoding adds to the scores, and a diagram of how ALiBi and CABLE compute it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from cable_attn.attention.call import Call
from cable_attn.errors import CableError
from cable_attn.explore.tokens import Tokenised
from cable_attn.models.capture import layer_calls
from cable_attn.report import COLOURS, pyplot, save

RANGE = 8.0
"""Of a bias in pictures: at −8 a weight is 0.03 % of what it would be."""
SCORE = "attention score"
"""What is shown of an encoding that adds no bias."""
MOST = 1024
"""Tokens of a still figure: all T×T numbers of a layer are drawn."""


@torch.no_grad()
def added(model: Any, tokens: Tokenised, layer: int) -> tuple[np.ndarray, str]:
    """What a layer's encoding adds to the scores [H, T, T], NaN where a query sees nothing, and what to call it.

    An encoding that adds nothing, like rope, shows the scores themselves; one that looks at the scores, like DAPEv2,
    all that it changes in them.
    """
    if len(tokens.ids) > MOST:
        raise CableError(f"a still figure shows at most {MOST} tokens, got {len(tokens.ids)}. Give a smaller --tokens.")
    calls = layer_calls(model.eval(), tokens.ids[None].to(model.device))
    if not -len(calls) <= layer < len(calls):
        raise CableError(f"the model has no layer {layer}: it has the layers 0 to {len(calls) - 1} (−1 is the last).")
    values, name = _added(calls[layer])
    i, j = calls[layer].indices(range(len(tokens.ids)))
    seen = calls[layer].layout.visible(i, j)
    return values.masked_fill(~seen, float("nan"))[0].double().cpu().numpy(), name


def _added(call: Call) -> tuple[torch.Tensor, str]:
    i, j = call.indices(range(call.q.shape[2]))
    q = call.q.to(call.wide) * call.scale
    scores = q @ call.k.to(call.wide).repeat_interleave(call.groups, dim=1).transpose(-1, -2)
    if call.bias is None and call.mix is None:
        return scores, SCORE
    bias = None if call.bias is None else call.bias.rows(i, j).to(call.wide).expand_as(scores)
    if call.mix is None:
        assert bias is not None
        return bias, "bias"
    return call.mix(scores, bias, q, call.layout.visible(i, j)) - scores, "added to the score"


def colour_range(values: np.ndarray) -> tuple[float, float]:
    """From the highest value (without outliers) down to the lowest, but not further than makes a difference."""
    low, high = np.nanpercentile(values, [1, 99.5])
    low = max(low, high - RANGE)
    return (low, high) if high > low else (low - 1, high)


def bias_figure(model: Any, tokens: Tokenised, layer: int, stem: Path) -> list[Path]:
    """Heat maps of all heads of a layer, on one scale."""
    values, name = added(model, tokens, layer)
    heads, columns = len(values), min(len(values), 6 if len(values) % 4 else 4)
    rows = -(-heads // columns)
    figure, panels = pyplot().subplots(
        rows,
        columns,
        figsize=(2.1 * columns + 0.9, 2.15 * rows + 0.7),
        layout="constrained",
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    picture = None
    for head, axes in enumerate(panels.flat):
        if head >= heads:
            axes.set_visible(False)
            continue
        picture = _heat(axes, values[head], colour_range(values))
        axes.set_title(f"head {head}", fontsize=9)
    figure.colorbar(picture, ax=panels, label=name, extend="min", shrink=0.8)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.suptitle(f"{model.config.encoding}, layer {layer % model.config.num_hidden_layers}", fontsize=11)
    return save(figure, stem)


def _heat(axes: Any, values: np.ndarray, scale: tuple[float, float]) -> Any:
    picture = axes.imshow(values, vmin=scale[0], vmax=scale[1], cmap="cividis", interpolation="nearest")
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return picture


def compare_figure(models: list[tuple[Any, Tokenised]], layer: int, head: int, stem: Path) -> list[Path]:
    """Two models on one text: the heat map of one head, and the bias of the last query in all heads."""
    figure, panels = pyplot().subplots(
        2, len(models), figsize=(4.4 * len(models), 7), layout="constrained", height_ratios=[1.25, 1], squeeze=False
    )
    found = [(*added(model, tokens, layer), model, tokens) for model, tokens in models]
    scale = (-RANGE, 0.0) if all(np.nanmax(values) <= 0 for values, *_ in found) else None
    for column, (values, name, model, tokens) in enumerate(found):
        if head >= len(values):
            raise CableError(f"the model has no head {head}: it has the heads 0 to {len(values) - 1}.")
        top, below = panels[:, column]
        picture = _heat(top, values[head], scale or colour_range(values))
        where = f"layer {layer % model.config.num_hidden_layers}, head {head}"
        top.set_title(f"{model.config.encoding}: {where}", fontsize=10)
        top.set_xlabel("key", fontsize=9)
        top.set_ylabel("query", fontsize=9)
        figure.colorbar(picture, ax=top, label=name, shrink=0.8, extend="min")
        _curves(below, values, tokens, len(tokens.ids) - 1)
        below.set_ylabel(name, fontsize=9)
    most = max(panels[1], key=lambda axes: len(axes.lines))
    figure.legend(handles=most.lines, frameon=False, fontsize=8, ncols=8, loc="outside lower center")
    return save(figure, stem)


def _curves(axes: Any, values: np.ndarray, tokens: Tokenised, query: int) -> None:
    """The row of one query in every head."""
    for head, rows in enumerate(values):
        style = ("-", "--", ":", "-.")[head % 4]
        axes.plot(rows[query], style, color=COLOURS[head % len(COLOURS)], linewidth=1.6, label=f"head {head}")
    axes.set_ylim(max(np.nanmin(values[:, query]), -1.6 * RANGE), max(np.nanmax(values[:, query]), 0) + 0.3)
    axes.set_xlabel(f"key (query {query}, “{tokens.pieces[query].strip()}”)", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


EXAMPLE = ("The", "door", "opened", ".", "She", "ran")
STEPS = np.array([0.2, 0.9, 0.6, 2.0, 0.5, 0.7])
GAINS = np.array([0.5, 1.2, 0.8, 0.3, 1.5, 0.4])
SLOPE = 0.5


def diagram_figure(stem: Path) -> list[Path]:
    """How ALiBi and CABLE come to their biases, on six tokens with made-up steps and gains."""
    figure, panels = pyplot().subplots(
        2, 4, figsize=(11, 6.1), layout="constrained", width_ratios=[1.1, 1.25, 0.42, 1.25]
    )
    count = len(EXAMPLE)
    rows = (
        (np.ones(count), np.full(count, SLOPE), "ALiBi: every token adds 1", "$i - j$", "a slope $m$\nper head", "m"),
        (STEPS, GAINS, "CABLE: each token adds a step $f$\nlearned from its content", "$c_i - c_j$",
         "a gain $g_i$\nper query", "g_i"),
    )  # fmt: skip
    for (steps, gains, adds, apart, feels, factor), axes in zip(rows, panels):
        c = steps.cumsum()
        distance = np.where(np.tri(count, dtype=bool), c[:, None] - c[None], np.nan)
        _bars(axes[0], steps, c, adds)
        _grid(axes[1], distance, f"distance {apart}", (0, 5), "Blues")
        _grid(axes[2], gains[:, None], feels, (0, 2), "Greens")
        bias = f"bias $-{factor}({apart.strip('$')})$,\nadded to $q_i\\cdot k_j/\\sqrt{{D}}$"
        _grid(axes[3], -gains[:, None] * distance, bias, (-5, 0), "cividis")
        for place, sign in ((axes[1], "×"), (axes[2], "→")):
            place.annotate(sign, (1.06, 0.5), xycoords="axes fraction", fontsize=15, va="center", annotation_clip=False)
    return save(figure, stem)


def _bars(axes: Any, steps: np.ndarray, c: np.ndarray, title: str) -> None:
    """Each step begins where the one before ended: the running sum is the potential c."""
    for place, (step, end) in enumerate(zip(steps, c)):
        axes.barh(place, step, left=end - step, color=COLOURS[1], edgecolor="0.3", height=0.6)
        axes.annotate(f"{step:g}", (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(EXAMPLE)), EXAMPLE)
    axes.set_xlim(0, 7)
    axes.set_ylim(len(EXAMPLE) - 0.5, -0.5)
    axes.set_xlabel("potential $c$, the running sum", fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _grid(axes: Any, values: np.ndarray, title: str, scale: tuple[float, float], palette: str) -> None:
    picture = axes.imshow(values, cmap=palette, vmin=scale[0], vmax=scale[1], aspect="equal")
    for (y, x), value in np.ndenumerate(values):
        if not np.isnan(value):
            red, green, blue, _ = picture.cmap(picture.norm(value))
            dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
            text = f"{value:.2g}".replace("-", "−") if abs(value) > 1e-9 else "0"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color="w" if dark else "k")
    axes.set_title(title, fontsize=10)
    axes.set_yticks(range(len(EXAMPLE)), EXAMPLE, fontsize=8)
    axes.set_xticks(range(values.shape[1]), EXAMPLE if values.shape[1] > 1 else [""], fontsize=8, rotation=45)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
