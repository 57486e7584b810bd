"""Variants of a study beside each other, as Markdown: speeds, the same documents, text far back, how they learned.

Where a study is like one of the paper's, the paper's own number stands in square brackets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import compress, pairwise

from cable_attn import findings
from cable_attn.evaluation import ByDocument, perplexity_over
from cable_attn.summary import Gathered
from cable_attn.tables import markdown_table, mean_text

Band = tuple[int, int]
"""Tokens with at least so many before them, and fewer than so many."""
SHARES = 6
"""Of a training, to see who is ahead when."""


def speeds(gathered: Gathered) -> str:
    """Markdown: how fast each was trained and reads."""
    trained: dict[str, list[float]] = {}
    for row in gathered.rows:
        if (speed := row["training"].get("median_tokens_per_second")) is not None:
            trained.setdefault(row["variant"], []).append(speed / 1000)
    read = findings.reading_speeds(gathered.rows)
    lengths = sorted({length for own in read.values() for length in own})
    lines = [
        [name, mean_text(trained.get(name, []), 1), *(mean_text(own.get(length, []), 1) for length in lengths)]
        for name, own in read.items()
    ]
    title = "**Thousands of tokens a second in training, and read so many at once**"
    return f"{title}\n\n{markdown_table(['encoding', 'training', *map(str, lengths)], lines)}"


def ratios(gathered: Gathered) -> str:
    """Markdown: perplexities over another variant's, where both were read on the same documents."""
    found = {name: _of_seeds(by_seed) for name, by_seed in _by_document(gathered).items()}
    pairs, lengths = _pairs(gathered, list(found)), sorted({length for own in found.values() for length in own})
    lines = []
    for name, base in pairs.items():
        ours, theirs = found.get(name, {}), found.get(base, {})
        cells = [_over(ours.get(length, []), theirs.get(length, [])) for length in lengths]
        seeds = " / ".join(str(max(map(len, own.values()), default=0)) for own in (ours, theirs))
        if told := [length for cell, length in zip(cells, lengths) if cell != "–"]:
            worse = _worse_on(ours[told[-1]], theirs[told[-1]])
            cells = [cell + _paper_ratio(gathered, name, base, length) for cell, length in zip(cells, lengths)]
            lines.append([_named(gathered, name, base), seeds, *cells, worse])
    if not lines:
        return ""
    drawn = "in brackets 95 % of it when these are drawn anew; the chance of other seeds comes on top"
    theirs_too = "; in square brackets the paper's" if gathered.paper_rows else ""
    worse = "worse on: so many documents, at the longest of these lengths"
    title = f"**Perplexity over {_whose(gathered)} on the same documents; {drawn}{theirs_too}; {worse}**"
    return f"{title}\n\n{markdown_table(['encoding', 'seeds', *map(str, lengths), 'worse on'], lines)}"


def _worse_on(ours: list[ByDocument], theirs: list[ByDocument]) -> str:
    """Of how many documents, all seeds of each together."""
    own, other = (
        [statistics.fmean(loss) for loss in zip(*([n for _, n in one] for one in all_))] for all_ in (ours, theirs)
    )
    return f"{sum(one > two for one, two in zip(own, other))} of {len(own)}"


def _by_document(gathered: Gathered) -> dict[str, list[dict[int, ByDocument]]]:
    """variant → for each seed: length → the losses by document."""
    found: dict[str, list[dict[int, ByDocument]]] = {}
    for row in findings.with_again(gathered.rows):
        told = {one["length"]: one["by_document"] for one in row["results"] if len(one.get("by_document") or []) > 1}
        if told:
            found.setdefault(row["variant"], []).append(told)
    return found


def _of_seeds(by_seed: list[dict[int, ByDocument]]) -> dict[int, list[ByDocument]]:
    """length → of all seeds that were read at it."""
    lengths = sorted({length for own in by_seed for length in own})
    return {length: [own[length] for own in by_seed if length in own] for length in lengths}


def _pairs(gathered: Gathered, names: Sequence[str]) -> Mapping[str, str]:
    """Each variant and the one that it is told over."""
    first = gathered.rows[0]["variant"]
    return gathered.against or {name: first for name in names if name != first}


def _named(gathered: Gathered, name: str, base: str) -> str:
    return f"{name} over {base}" if gathered.against else name


def _whose(gathered: Gathered) -> str:
    return "another's" if gathered.against else f"{gathered.rows[0]['variant']}'s"


def _over(ours: list[ByDocument], theirs: list[ByDocument]) -> str:
    """Each a mean of its seeds, all on the same documents."""
    if not ours or not theirs or len({tuple(n for n, _ in one) for one in (*ours, *theirs)}) > 1:
        return "–"
    ratio, low, high = perplexity_over(ours, theirs)
    return f"{ratio:.3f} ({low:.3f} – {high:.3f})"


def _paper_ratio(gathered: Gathered, name: str, base: str, length: int) -> str:
    ours, theirs = (gathered.paper_rows.get(one, {}).get(str(length)) for one in (name, base))
    return f" [{ours / theirs:.3f}]" if ours and theirs else ""


def contexts(gathered: Gathered) -> str:
    """Markdown: what text further back is worth to each."""
    near, told = reference(gathered), by_context(gathered)
    bands = sorted({band for own in told.values() for band in own if band != near})
    if near is None or not bands:
        return ""
    lines = []
    for name, own in told.items():
        theirs = paper_contexts(gathered.paper_rows.get(name, {}), near)
        if set(own) - {near}:
            lines.append([name, *(_change(own.get(band), theirs.get(band)) for band in bands)])
    theirs_too = "; in square brackets the same from the paper's numbers" if gathered.paper_rows else ""
    title = (
        f"**Perplexity of tokens with so many before them, % above that of tokens with {near[0]} to {near[1]}; in "
        f"brackets 95 % of it when documents are drawn anew; the chance of other seeds comes on top{theirs_too}**"
    )
    return f"{title}\n\n{markdown_table(['encoding', *(f'{low} to {high}' for low, high in bands)], lines)}"


def _change(found: tuple[float, float, float] | None, theirs: float | None) -> str:
    if found is None:
        return "–"
    ratio, low, high = map(percent_above, found)
    return f"{ratio} ({low} to {high})" + (f" [{percent_above(theirs)}]" if theirs else "")


def percent_above(ratio: float) -> str:
    above = 100 * (ratio - 1)
    return signed(above, 0 if abs(above) >= 10 else 1)


def signed(value: float, digits: int) -> str:
    """With a true minus, and none before nothing."""
    told = f"{value:+.{digits}f}"
    return told[1:] if not float(told) else told.replace("-", "−")


def reference(gathered: Gathered) -> Band | None:
    """The tokens that others are told over: the last within the training length that are told apart from the beginning
    of a text, or else the first past it."""
    near = gathered.trained_at
    read = (own for by_seed in _by_document(gathered).values() for own in by_seed)
    bands = list(pairwise(sorted({length for own in read for length in own})))
    overlap = any(row["settings"].get("reading", {}).get("stride") for row in gathered.rows)
    if near is None or not bands or overlap:  # windows that overlap do not tell a band apart
        return None
    within = [band for band in bands if band[1] <= near]
    return within[-1] if within else bands[0]


def by_context(gathered: Gathered) -> dict[str, dict[Band, tuple[float, float, float]]]:
    """variant → band → its perplexity over that of the reference, with an interval.

    Long windows lower the perplexity of any model, because fewer tokens have little before them. What windows of two
    lengths tell of the same text tells these apart: all that the longer one adds has at least the shorter one's length
    before it. Of seeds that were read at all lengths that any was.
    """
    near, told = reference(gathered), dict[str, dict[Band, tuple[float, float, float]]]()
    for name, seeds in _read_throughout(gathered).items():
        bands = {band: [_added(own, band) for own in seeds] for band in pairwise(sorted(seeds[0]))}
        if near in bands:
            told[name] = {band: perplexity_over(own, bands[near]) for band, own in bands.items() if band >= near}
    return told


def by_far_text(gathered: Gathered) -> dict[str, dict[int, float]]:
    """variant → length longer than in training → perplexity over what it would be if far text were worth nothing."""
    near = reference(gathered)
    if near is None or near[1] != gathered.trained_at:
        return {}
    read = {
        name: {n: statistics.mean(_loss(own[n]) for own in seeds) for n in seeds[0]}
        for name, seeds in _read_throughout(gathered).items()
    }
    return {name: over_no_far_text(losses, near) for name, losses in read.items() if set(near) <= set(losses)}


def over_no_far_text(losses: Mapping[int, float], near: Band) -> dict[int, float]:
    """By length. ``near``: the tokens with the most before them that training knows.

    If all that have more before them were as hard as those, longer windows would gain all the same: fewer of their
    tokens have little before them.
    """
    low, trained_at = near
    level = _between(losses[low], losses[trained_at], near)
    without = {n: level + (losses[trained_at] - level) * trained_at / n for n in losses if n > trained_at}
    return {n: math.exp(losses[n] - loss) for n, loss in without.items()}


def _loss(documents: ByDocument) -> float:
    counts, losses = zip(*documents)
    return statistics.fmean(losses, counts)


def _read_throughout(gathered: Gathered) -> dict[str, list[dict[int, ByDocument]]]:
    """variant → its seeds that were read at all lengths that any was, of whole documents."""
    told = {}
    for name, by_seed in _by_document(gathered).items():
        lengths = sorted({length for own in by_seed for length in own})
        seeds = [whole for own in by_seed if sorted(own) == lengths and (whole := _whole_documents(own))]
        if seeds:
            told[name] = seeds
    return told


def _whole_documents(own: dict[int, ByDocument]) -> dict[int, ByDocument]:
    """Those of which every length reads the very same tokens: of a text's end long windows leave out more."""
    both = [len({count for count, _ in one}) == 1 for one in zip(*own.values())]
    return {length: list(compress(one, both)) for length, one in own.items()} if any(both) else {}


def _added(own: dict[int, ByDocument], band: Band) -> ByDocument:
    """Of each document the loss of the tokens that the longer windows add."""
    shorter, longer = (own[length] for length in band)
    return [(count, _between(near, far, band)) for (count, near), (_, far) in zip(shorter, longer)]


def _between(near: float, far: float, band: Band) -> float:
    """The loss of what longer windows add, from that of windows of each length."""
    low, high = band
    return (high * far - low * near) / (high - low)


def paper_contexts(row: Mapping[str, float | None], near: Band) -> dict[Band, float]:
    """band → what the paper's perplexities make of it, over the reference."""
    read = {int(length): math.log(value) for length, value in row.items() if value}
    losses = {(low, high): _between(read[low], read[high], (low, high)) for low, high in pairwise(sorted(read))}
    return {band: math.exp(loss - losses[near]) for band, loss in losses.items()} if near in losses else {}


def learning(gathered: Gathered) -> str:
    """Markdown: by how much the loss in training was above another's, over the course of it."""
    gaps = training_gaps(gathered)
    pairs = _pairs(gathered, list(dict.fromkeys(row["variant"] for row in gathered.rows)))
    lines = [[_named(gathered, name, pairs[name]), *(signed(gap, 3) for gap in own)] for name, own in gaps.items()]
    title = f"**Training loss above {_whose(gathered)} in each sixth of the training**"
    header = ["encoding", *(f"{n}/{SHARES}" for n in range(1, SHARES + 1))]
    return f"{title}\n\n{markdown_table(header, lines)}" if lines else ""


def training_gaps(gathered: Gathered) -> dict[str, list[float]]:
    """variant → for each share of the training the mean gap of the seeds that both have."""
    curves = {(row["variant"], row["seed"]): row["training"].get("curve") or [] for row in gathered.rows}
    if gathered.trained_at is None:  # losses of windows of several lengths are not of the same tokens
        return {}
    found = {}
    for name, base in _pairs(gathered, [name for name, _ in curves]).items():
        both = [(curves[name, seed], curves.get((base, seed), [])) for own, seed in curves if own == name]
        gaps = [_gaps(ours, theirs) for ours, theirs in both if [n for n, _ in ours] == [n for n, _ in theirs]]
        if gaps := [gap for gap in gaps if gap]:
            found[name] = [statistics.fmean(seeds) for seeds in zip(*gaps)]
    return found


def _gaps(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> list[float]:
    if len(ours) < SHARES:
        return []
    apart = [own - other for (_, own), (_, other) in zip(ours, theirs)]
    cuts = [round(n * len(apart) / SHARES) for n in range(SHARES + 1)]
    return [statistics.fmean(apart[low:high]) for low, high in pairwise(cuts)]
