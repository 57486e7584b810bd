"""Variants of a study beside each other, as Markdown: their speeds, the same documents, text far back."""

from __future__ import annotations

from cable_attn import findings
from cable_attn.evaluation import ByDocument, perplexity_over
from cable_attn.summary import Gathered
from cable_attn.tables import markdown_table, mean_text


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
    found: dict[str, dict[int, list[ByDocument]]] = {}
    for row in findings.with_again(gathered.rows):
        for result in row["results"]:
            if len(result.get("by_document") or []) > 1:
                found.setdefault(row["variant"], {}).setdefault(result["length"], []).append(result["by_document"])
    first = gathered.rows[0]["variant"]
    pairs = gathered.against or {name: first for name in found if name != first}
    lengths = sorted({length for own in found.values() for length in own})
    lines = []
    for name, base in pairs.items():
        ours, theirs = found.get(name, {}), found.get(base, {})
        cells = [_over(ours.get(length, []), theirs.get(length, [])) for length in lengths]
        seeds = " / ".join(str(max(map(len, own.values()), default=0)) for own in (ours, theirs))
        if set(cells) - {"–"}:
            lines.append([f"{name} over {base}" if gathered.against else name, seeds, *cells])
    if not lines:
        return ""
    over = "Perplexity over another's" if gathered.against else f"Perplexity over {first}'s"
    drawn = "in brackets 95 % of it when these are drawn anew; the chance of other seeds comes on top"
    title = f"**{over} on the same documents; {drawn}**"
    return f"{title}\n\n{markdown_table(['encoding', 'seeds', *map(str, lengths)], lines)}"


def _over(ours: list[ByDocument], theirs: list[ByDocument]) -> str:
    """Each a mean of its seeds, all on the same documents."""
    if not ours or not theirs or len({tuple(n for n, _ in one) for one in (*ours, *theirs)}) > 1:
        return "–"
    return _with_interval(*perplexity_over(ours, theirs))


def _with_interval(ratio: float, low: float, high: float) -> str:
    return f"{ratio:.3f} ({low:.3f} – {high:.3f})"


def far_context(gathered: Gathered) -> str:
    """Markdown: what each makes of text further back than it was trained on."""
    near, far, told = gathered.trained_at, _longest(gathered), far_ratios(gathered)
    lines = [[name, str(seeds), _with_interval(*found)] for name, (seeds, found) in told.items()]
    title = f"**Perplexity at {far} tokens over what it would be if nothing further back than {near} told anything**"
    return f"{title}\n\n{markdown_table(('encoding', 'seeds', 'ratio'), lines)}" if lines else ""


def _longest(gathered: Gathered) -> int:
    return max((n for row in findings.by_variant(gathered.rows).values() for n in row), default=0)


def far_ratios(gathered: Gathered) -> dict[str, tuple[int, tuple[float, float, float]]]:
    """variant → its seeds, and its perplexity over one without far text, with an interval.

    Long windows lower the perplexity of any model, because fewer tokens have little before them. So the longest is
    compared with what it would be if from the training length on every token were predicted as with half of that length
    or more before it: what windows of the half and of the whole tell of the same documents.
    """
    near, far = gathered.trained_at, _longest(gathered)
    if near is None or far <= near:
        return {}
    found: dict[str, list[ByDocument]] = {}
    as_if: dict[str, list[ByDocument]] = {}
    for row in findings.with_again(gathered.rows):
        read = {result["length"]: result.get("by_document") or [] for result in row["results"]}
        at_half, at_near, at_far = (read.get(n, []) for n in (near // 2, near, far))
        if len(at_half) == len(at_near) == len(at_far) > 1:
            found.setdefault(row["variant"], []).append(at_far)
            as_if.setdefault(row["variant"], []).append(_as_if_near(at_half, at_near, at_far, near / far))
    return {name: (len(own), perplexity_over(own, as_if[name])) for name, own in found.items()}


def _as_if_near(half: ByDocument, near: ByDocument, far: ByDocument, share: float) -> ByDocument:
    """Of each document the loss at the longest length, if all but the first ``share`` of it had as much before it as
    the second half of a near window has: twice the loss of the whole less that of the halves."""
    return [
        (count, share * whole + (1 - share) * (2 * whole - first))
        for (count, _), (_, whole), (_, first) in zip(far, near, half)
    ]
