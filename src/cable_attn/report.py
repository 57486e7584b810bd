"""Figures, as PNG, SVG and PDF."""

from __future__ import annotations

import io
import itertools
import math
import statistics
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cable_attn.files import write_atomically

Perplexities = Mapping[str, Mapping[int, Sequence[float]]]
"""encoding → length → the perplexities of all seeds; a length that an encoding cannot read is absent."""

Found = Mapping[str, list[dict[str, Any]]]
"""name → a row for each length and depth, with the share of facts found there."""

Curves = Mapping[str, list[tuple[int, float]]]
"""name → (tokens or place, loss)."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")  # Okabe and Ito
FAMILIES = {
    "cable": ("#0072B2", "o"),
    "cable-nw": ("#56B4E9", "s"),
    "k-cable": ("#332288", "^"),
    "alibi": ("#E69F00", "D"),
    "rope": ("#009E73", "v"),
    "kerple": ("#CC79A7", "P"),
    "fire": ("#D55E00", "X"),
    "t5": ("#000000", "*"),
    "fox": ("#999933", "<"),
    "learnable": ("#777777", "s"),
    "sinusoidal": ("#882255", "D"),
    "nope": ("#AAAAAA", "v"),
    "cope": ("#44AA99", "p"),
    "dapev2-cable": ("#117733", ">"),
    "dapev2-kerple": ("#AA4499", "d"),
}
"""Colour and marker of each encoding: in all figures the same. One of its variants has another line."""
OTHERS = (("#8B5A2B", "o"), ("#F0C000", "h"), ("#7A5195", "H"))
"""When none of these is left."""
LINES = ("-", "--", ":", "-.")
MARKERS = ("1", "2", "3", "4", "+", "x")
"""For what has the same colour and line."""
MARKED = 0.12
"""Share of a line from one of its marks to the next."""
NOTE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": "0.4"}
WORST = 1.3
"""Perplexities past so many times the lowest leave a figure, so that those of close rivals can be told apart."""
CLOSE = 1.2
"""A rival is close whose perplexity over all of a text is at most so many times the lowest."""
BEGINNING = 0.1
"""The share of a training whose losses leave a figure, for the same reason: they are far above all later ones."""
FEWEST_PLACES = 16
"""That a point of a figure is the mean of: a text has few first places, and their losses are noisy."""
MOST_POINTS = 100
"""Of a curve of losses: of more the means of neighbours are drawn, which hide no rival behind their noise."""

MOST_PANELS = 3
"""Beside each other."""
LEGEND_WIDTH = 32
"""Characters of a name on one line; longer ones would leave no room for the figure."""

KINDS = ("png", "svg", "pdf")
UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""The same figure gives the same bytes."""


def pyplot() -> Any:
    """matplotlib (the ``plot`` extra), without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cable-attn"  # the same figure gives the same bytes
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, stem: Path) -> list[Path]:
    """``stem``.png, .svg and .pdf; the one file if it ends so already."""
    one = stem.suffix[1:]
    paths = [stem] if one in KINDS else [stem.with_name(f"{stem.name}.{kind}") for kind in KINDS]
    for path in paths:
        picture, kind = io.BytesIO(), path.suffix[1:]
        figure.savefig(picture, format=kind, dpi=160, metadata=UNDATED.get(kind))
        write_atomically(path, picture.getvalue())
    pyplot().close(figure)
    return paths


def speed_figure(rows: list[dict[str, Any]], stem: Path) -> list[Path]:
    """Forward and backward time of each peer over that of SDPA flash, one panel a shape, as PNG, SVG and PDF."""
    shapes = list(dict.fromkeys(tuple(row["shape"].values()) for row in rows))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    figure, panels = pyplot().subplots(
        1, len(shapes), figsize=(3 * len(shapes), 3.4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, shape in zip(panels[0], shapes):
        times = {
            row["peer"]: row["both_ms"] for row in rows if tuple(row["shape"].values()) == shape and "error" not in row
        }
        unit = times.get("sdpa flash")
        for place, name in enumerate(names):
            if unit is None or name not in times:
                continue
            ratio = times[name] / unit
            axes.barh(place, ratio, color=COLOURS[0] if name == "cable" else "0.75", height=0.7)
            axes.annotate(f"{ratio:.2f}", (ratio, place), xytext=(3, 0), va="center", **NOTE)
        axes.axvline(1, color="0.6", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(0.3, 100)
        axes.set_title("B,H,T,D = " + ",".join(map(str, shape)), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    figure.supxlabel("forward and backward, time over SDPA flash (log scale; left is faster)", fontsize=9)
    return save(figure, stem)


def training_figure(rows: list[dict[str, Any]], stem: Path) -> list[Path]:
    """Training time and peak memory of each encoding, one column a model size, as PNG, SVG and PDF."""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    names = list(dict.fromkeys(row["encoding"] for row in rows))
    size_in_inches = (3.2 * len(sizes) + 1, 0.5 * len(names) + 2)
    figure, panels = pyplot().subplots(
        2, len(sizes), figsize=size_in_inches, sharey=True, layout="constrained", squeeze=False
    )
    for column, size in enumerate(sizes):
        for row in rows:
            if row["size"] != size or "error" in row:
                continue
            place = names.index(row["encoding"])
            for axes, value in zip(panels[:, column], (1e6 / row["tokens_per_second"], (row["peak_mib"] or 0) / 1024)):
                axes.barh(place, value, color=COLOURS[0] if row["encoding"] == "cable" else "0.75", height=0.7)
                axes.annotate(f"{value:.3g}", (value, place), xytext=(3, 0), va="center", **NOTE)
        panels[0][column].set_title(size, fontsize=9)
        panels[0][column].set_xlabel("seconds for a million tokens", fontsize=9)
        panels[1][column].set_xlabel("peak memory, GiB", fontsize=9)
    for axes in panels.flat:
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    return save(figure, stem)


def generation_figure(decode: list[dict[str, Any]], prefill: list[dict[str, Any]], stem: Path) -> list[Path]:
    """One text at a time: milliseconds a token and seconds to the first one against the length, as PNG, SVG and PDF."""
    figure, panels = pyplot().subplots(1, 2, figsize=(9.6, 5.2), layout="constrained")
    decode, prefill = (
        [row for row in rows if row.get("precision") != "fp32" and not row.get("piece")] for rows in (decode, prefill)
    )
    kinds = ((decode, "ms", "milliseconds a token"), (prefill, "seconds_to_first_token", "seconds to the first token"))
    names = list(dict.fromkeys(row["model"] for row in [*decode, *prefill]))
    for axes, (rows, key, label) in zip(panels, kinds):
        for name, look in _looks(names).items():
            own = {row["length"]: row[key] for row in rows if row["model"] == name and row["batch"] == 1}  # the last
            axes.plot(sorted(own), [own[length] for length in sorted(own)], label=name, linewidth=1.5, **look)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda length, _: _length(round(length)))
        _log_scale(axes)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel(label)
        axes.grid(axis="y", color="0.92")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=5)
    return save(figure, stem)


def forgetting_figure(rows: list[dict[str, Any]], stem: Path) -> list[Path]:
    """The keys that each layer's cache holds against the tokens it has seen, as PNG, SVG and PDF."""
    layers = range(len(rows[0]["kept"]))
    curves = {f"layer {layer}": [(row["tokens"], row["kept"][layer]) for row in rows] for layer in layers}
    curves = {"everything": [(row["tokens"], row["tokens"]) for row in rows], **curves}
    return save(_lines(curves, "keys in the cache", "tokens read")[0], stem)


def passkey_figure(found: Found, stem: Path) -> list[Path]:
    """The share found over length and depth, a heat map with its numbers for each name, as PNG, SVG and PDF."""
    found = {name: [row for row in rows if "error" not in row] for name, rows in found.items()}
    lengths, depths = (sorted({row[key] for rows in found.values() for row in rows}) for key in ("length", "depth"))
    columns = min(len(found), MOST_PANELS)
    lines = math.ceil(len(found) / columns)
    size = (1 + columns * (0.4 + 0.6 * len(lengths)), 0.6 + lines * (0.5 + 0.32 * len(depths)))
    figure, panels = pyplot().subplots(
        lines, columns, figsize=size, sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for axes, (name, rows) in zip(panels.flat, found.items()):
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=8)
        _heat_map(axes, {(row["depth"], row["length"]): row["accuracy"] for row in rows}, depths, lengths)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    panels[0][0].set_xticks(range(len(lengths)), [_length(length) for length in lengths])
    panels[0][0].set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    figure.supxlabel("tokens in the text", fontsize=9)
    figure.supylabel("depth of the fact", fontsize=9)
    return save(figure, stem)


def _heat_map(
    axes: Any, found: Mapping[tuple[float, int], float], depths: Sequence[float], lengths: Sequence[int]
) -> None:
    image = [[found.get((depth, length), math.nan) for length in lengths] for depth in depths]
    axes.imshow(image, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for y, row in enumerate(image):
        for x, value in enumerate(row):
            told, colour = ("–", "k") if math.isnan(value) else (f"{value:.0%}", "w" if value < 0.6 else "k")
            axes.text(x, y, told, ha="center", va="center", fontsize=7, color=colour)


def loss_figure(
    curves: Curves, stem: Path, what: str = "training loss", along: str = "tokens seen in training"
) -> list[Path]:
    """Loss against tokens seen, a line for each name, as PNG, SVG and PDF."""
    curves = {name: _averaged(curve) for name, curve in curves.items()}
    figure, axes = _lines(curves, what, along)
    later = [loss for curve in curves.values() for n, loss in curve if n >= BEGINNING * curve[-1][0]]
    if later and max(later) > min(later):
        margin = 0.05 * (max(later) - min(later))
        axes.set_ylim(min(later) - margin, max(later) + margin)
    import matplotlib

    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    return save(figure, stem)


def _averaged(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """(the last of a few neighbours, the mean of their losses)."""
    few = math.ceil(len(curve) / MOST_POINTS)
    groups = [curve[n : n + few] for n in range(0, len(curve), max(few, 1))]
    return [(group[-1][0], statistics.fmean(loss for _, loss in group)) for group in groups]


def place_figure(curves: Curves, trained_at: int | None, stem: Path) -> list[Path]:
    """Loss at each place of a long text, a line for each name, as PNG, SVG and PDF."""
    curves = {name: [(n, loss) for n, loss in curve if math.isfinite(loss)] for name, curve in curves.items()}
    curves = {name: _joined(curve) for name, curve in curves.items() if curve}
    values = [loss for curve in curves.values() for _, loss in curve]
    behind = {name: _behind_the_beginning(curve, trained_at or 0) for name, curve in curves.items()}
    close = _close_rivals(curves)
    top = max([min(values, default=0.0) + math.log(WORST), *(loss for name in close for loss in behind[name])])
    labels = {name: _labelled(name, behind[name], top, ".1f") for name in curves}
    figure, axes = _lines(curves, "loss on held-out text", "place in the text, tokens", labels)
    _mark_training(axes, trained_at)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda place, _: _length(round(place)))
    if values:
        axes.set_ylim(min(values) - 0.05, max(value for value in values if value <= top) + 0.05)
    return save(figure, stem)


def _behind_the_beginning(curve: list[tuple[int, float]], trained_at: int) -> list[float]:
    """The losses from an eighth of the training length on: before, all are high, and nobody asks for them."""
    return [loss for place, loss in curve if place >= trained_at / 8] or [loss for _, loss in curve]


def _close_rivals(curves: Curves) -> list[str]:
    """Which a figure must show whole, but for the beginning."""
    means = {name: statistics.fmean(loss for _, loss in curve) for name, curve in curves.items()}
    return [name for name, mean in means.items() if mean <= min(means.values()) + math.log(CLOSE)]


def _joined(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """(last place, mean loss) of stretches that are joined until each is half an octave long."""
    stretches: list[tuple[int, int, float]] = []  # begin, end, total
    begin, before, total = 0, 0, 0.0
    for end, loss in curve:
        total, before = total + (end - before) * loss, end
        if end >= max(begin * math.sqrt(2), begin + FEWEST_PLACES):
            stretches.append((begin, end, total))
            begin, total = end, 0.0
    if before > begin:  # the rest is too short to stand alone
        first, _, earlier = stretches.pop() if stretches else (begin, begin, 0.0)
        stretches.append((first, before, earlier + total))
    return [(end, total / (end - begin)) for begin, end, total in stretches]


def _labelled(name: str, values: Collection[float], top: float, form: str) -> str:
    """The name, and from where to where it goes if that is past the top of the figure."""
    return name if max(values) <= top else f"{name} ({min(values):{form}} to {max(values):{form}})"


def _lines(curves: Curves, what: str, along: str, labels: Mapping[str, str] | None = None) -> tuple[Any, Any]:
    figure, axes = pyplot().subplots(figsize=(6.4, 4.2), layout="constrained")
    for name, look in _looks(curves).items():
        label = textwrap.fill((labels or {}).get(name, name), LEGEND_WIDTH)
        axes.plot(*zip(*curves[name]), label=label, linewidth=1.3, markersize=5, markevery=MARKED, **look)
    axes.set_xlabel(along)
    axes.set_ylabel(what)
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside right upper")
    return figure, axes


def _looks(names: Collection[str]) -> dict[str, dict[str, str]]:
    """How the line of each is drawn. Names that are of no encoding have what is left."""
    left = [look for family, look in FAMILIES.items() if not any(_is_of(family, name) for name in names)]
    spare = itertools.chain(left, itertools.cycle(OTHERS))
    families, looks = dict(FAMILIES), dict[str, dict[str, str]]()
    drawn: dict[tuple[str, str], int] = {}
    for name in names:
        of = [family for family in families if _is_of(family, name)]
        look = families[max(of, key=len)] if of else families.setdefault(name, next(spare))
        before = drawn[look] = drawn.get(look, -1) + 1
        colour, marker = look
        if before >= len(LINES):
            marker = MARKERS[before // len(LINES) % len(MARKERS)]
        looks[name] = {"color": colour, "marker": marker, "linestyle": LINES[before % len(LINES)]}
    return looks


def _is_of(family: str, name: str) -> bool:
    """Whether it is the encoding's own name, or that with more behind it: ``rope, YaRN × 16``."""
    rest = name.removeprefix(family)
    return rest != name and not rest[:1].isalnum()


def _mark_training(axes: Any, trained_at: int | None) -> None:
    if trained_at is None:
        return
    axes.axvline(trained_at, color="0.6", linestyle=":", linewidth=1)
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (4, 0), "zorder": 4}
    behind = {"facecolor": "w", "edgecolor": "none", "pad": 0.5}  # lines that leave the figure pass there
    axes.annotate("trained here", (trained_at, 0.97), bbox=behind, **place, **NOTE)


def _length(tokens: int) -> str:
    """Short enough that 65536 and 131072 fit beside each other."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}k"


def _log_scale(axes: Any) -> None:
    """Logarithmic, with round numbers."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    near = high < 5 * low  # no power of ten or one only
    axes.yaxis.set_major_locator(
        MaxNLocator(nbins=8, steps=[1, 2, 5, 10]) if near else LogLocator(subs=(1, 2, 5), numticks=20)
    )
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())


def perplexity_figure(results: Perplexities, trained_at: int | None, stem: Path) -> list[Path]:
    """Perplexity against length, the mean of seeds and a band of their deviation, as PNG, SVG and PDF."""
    figure, axes = pyplot().subplots(figsize=(6.4, 4.2), layout="constrained")
    finite = {
        name: {n: seeds for n, seeds in row.items() if all(map(math.isfinite, seeds))} for name, row in results.items()
    }
    means = {name: {n: statistics.fmean(seeds) for n, seeds in row.items()} for name, row in finite.items()}
    values = [value for row in means.values() for value in row.values()]
    top = WORST * min(values, default=1.0)
    looks = _looks(means)
    for n, (name, row) in enumerate(means.items()):
        order = 3 - n / 100  # the first encoding lies on top
        label = textwrap.fill(_labelled(name, row.values() or [top], top, ",.0f"), LEGEND_WIDTH)
        width = 2.5 if n == 0 else 1.5
        axes.plot(list(row), list(row.values()), label=label, linewidth=width, zorder=order, **looks[name])
        apart = [statistics.stdev(seeds) if len(seeds) > 1 else 0.0 for seeds in finite[name].values()]
        if any(apart):
            low, high = zip(*((mean - gap, mean + gap) for mean, gap in zip(row.values(), apart)))
            colour = looks[name]["color"]
            axes.fill_between(list(row), low, high, color=colour, alpha=0.2, linewidth=0, zorder=order - 0.005)
    _mark_training(axes, trained_at)
    lengths = sorted({length for row in means.values() for length in row})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_length(length) for length in lengths])
    if values:
        axes.set_ylim(0.96 * min(values), 1.04 * max(value for value in values if value <= top))
    _log_scale(axes)
    axes.set_xlabel("tokens read at once")
    axes.set_ylabel("perplexity on held-out text")
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside right upper")
    return save(figure, stem)
