"""Every number that is stored, by table, name and column: what claims compare and what pages say in their sentences.

    STUDY                             perplexity, by length
    STUDY seeds                       deviation over seeds as % of the mean, by length; ``all``: of all together
    STUDY context                     of tokens with LOW to HIGH before them, % above that of tokens with half of the
                                      training length to all of it, or of the first that are read: ``LOW-HIGH``
    STUDY far                         by how many % the text further back than in training changes the perplexity of
                                      longer windows, by their length
    STUDY gap                         loss in training above that of the variant that it is told over, in each sixth of
                                      it: ``1`` to ``6``
    STUDY passkey                     % of pass keys found, by length
    STUDY passkey back                the same by how far back they stood, up to so many tokens
    STUDY COLLECTION                  nDCG@10, by length
    STUDY loss                        in training ``half`` way and at the ``end``, and ``held-out`` at the end
    STUDY contrastive                 of fine-tuning, the last tenth of its curve: ``end``
    STUDY speed                       of one with ``speeds``: tokens a second in ``training``, ``reading`` and by length
    STUDY memory                      of one with ``speeds``: MiB in ``training``
    training, memory, parameters      of ``cable bench train``, by size
    decode, prefill                   of ``cable bench``, by length; numbers that stand together are of one run
    paper ENTRY                       what the paper prints, by length
    paper ENTRY context, far          what follows from it

Of several seeds it is the mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cable_attn import comparisons, findings, summary
from cable_attn import study as studies
from cable_attn.bench import records
from cable_attn.errors import unknown

CLAIMS = "claims.toml"
"""The one file beside the studies that is none."""
NEAR = (512, 1024)
"""Tokens with so many before them: over them the paper's numbers for those further back are told."""


@dataclass(frozen=True)
class Numbers:
    """name → column → value, and where they are stored."""

    values: Mapping[str, Mapping[str, float]]
    place: Path
    form: str = "{:.2f}"

    def has(self, name: str, column: str) -> bool:
        return column in self.values.get(name, {})


Known = Mapping[str, list[Numbers]]
"""By table; of several runs the last one first."""


@dataclass(frozen=True)
class Found:
    values: list[float]
    texts: list[str]
    place: Path


def read(stored: Path) -> Known:
    """All tables below the folder of the studies."""
    known: dict[str, list[Numbers]] = {}
    for name, numbers in _tables(stored):
        known.setdefault(name, []).append(numbers)
    return known


def find(known: Known, table: str, wanted: Sequence[tuple[str, str]], where: str) -> Found:
    """The (name, column)s of a table, from the last run that has them all. ``where`` they are asked for: in errors."""
    if table not in known:
        raise unknown(f"table in {where}", table, list(known))
    numbers = next((run for run in known[table] if all(run.has(*one) for one in wanted)), known[table][0])
    values = [_value(numbers, name, column, where) for name, column in wanted]
    return Found(values, [numbers.form.format(value).replace("-", "−") for value in values], numbers.place)


def _value(numbers: Numbers, name: str, column: str, where: str) -> float:
    if name not in numbers.values:
        raise unknown(f"name in {where}", name, list(numbers.values))
    row = numbers.values[name]
    if column not in row:
        raise unknown(f"column of {name!r} in {where}", column, list(row))
    return row[column]


def _tables(stored: Path) -> Iterator[tuple[str, Numbers]]:
    own = {path.stem: str(path) for path in sorted(stored.glob("*.toml")) if path.name != CLAIMS}
    for name, file in {**{name: name for name in studies.builtin()}, **own}.items():
        folder = stored / "results" / name
        if folder.is_dir():
            yield from _of_study(studies.load(file, checked=False), folder)
    for name, printed in findings.paper_numbers().items():
        yield f"paper {name}", Numbers(printed, stored, "{:g}")
        yield from _paper_far_text(name, printed, stored)
    speeds = stored / "results/training.jsonl"
    rows = records.latest_by_size(records.read(speeds)) if speeds.is_file() else []
    for name, key in (("training", "tokens_per_second"), ("memory", "peak_mib"), ("parameters", "parameters")):
        yield name, _by_name(rows, "encoding", "size", key, speeds, "{:,.0f}")
    for name, key in (("decode", "ms"), ("prefill", "seconds_to_first_token")):
        path = stored / f"results/{name}.jsonl"
        if path.is_file():
            for run in _runs(records.read(path)):
                yield name, _by_name(run, "model", "length", key, path, "{:.3f}")


def _runs(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """One text at a time; the last run first: numbers of two runs are not compared."""
    alone = [records.named(row) for row in rows if row.get("batch") == 1 and "error" not in row]
    runs: dict[Any, list[dict[str, Any]]] = {}
    for row in records.fastest(alone):
        runs.setdefault((row.get("commit"), row.get("begun")), []).append(row)
    return list(runs.values())[::-1]


def _of_study(study: studies.Study, folder: Path) -> Iterator[tuple[str, Numbers]]:
    gathered = summary.gather_study(study, folder)
    rows = gathered.rows
    if perplexities := findings.by_variant(rows):
        yield study.name, Numbers(_by_length(perplexities), folder)
        yield f"{study.name} seeds", Numbers(_deviations(perplexities), folder, "{:.1f} %")
    yield from _of_long_texts(study.name, gathered, folder)
    losses = [(row["variant"], "held-out", row["training"].get("eval_loss")) for row in rows]
    for row in rows:
        if curve := row["training"].get("curve"):
            losses += [
                (row["variant"], "half", _end(curve[: max(len(curve) // 2, 1)])),
                (row["variant"], "end", _end(curve)),
            ]
    yield f"{study.name} loss", Numbers(_means(losses), folder, "{:.3f}")
    if study.speeds:
        told = [(row["variant"], what, value) for row in findings.with_again(rows) for what, value in _speeds(row)]
        yield f"{study.name} speed", Numbers(_means(told), folder, "{:,.0f}")
        memory = [(row["variant"], "training", row["training"].get("peak_memory_mib")) for row in rows]
        yield f"{study.name} memory", Numbers(_means(memory), folder, "{:,.0f}")
    tuned = _means([(row["variant"], "end", _end(row["fine_tuning"]["curve"])) for row in rows if "fine_tuning" in row])
    if tuned:
        yield f"{study.name} contrastive", Numbers(tuned, folder, "{:.3f}")
    for collection in dict.fromkeys(name for row in rows for name in row.get("retrieval", {})):
        yield (
            f"{study.name} {Path(collection).name}",
            Numbers(_by_length(findings.found_documents(rows, collection)), folder),
        )


def _of_long_texts(name: str, gathered: summary.Gathered, folder: Path) -> Iterator[tuple[str, Numbers]]:
    rows = gathered.rows
    contexts = {
        variant: _above({band: ratio for band, (ratio, _, _) in own.items()})
        for variant, own in comparisons.by_context(gathered).items()
    }
    yield f"{name} context", Numbers(contexts, folder, "{:+z.1f} %")
    if far := comparisons.by_far_text(gathered):
        yield f"{name} far", Numbers({variant: _above(own) for variant, own in far.items()}, folder, "{:+z.1f} %")
    gaps = comparisons.training_gaps(gathered)
    shares = {variant: {str(n): gap for n, gap in enumerate(own, 1)} for variant, own in gaps.items()}
    yield f"{name} gap", Numbers(shares, folder, "{:.3f}")
    if found := findings.found_by_length(rows):
        yield f"{name} passkey", Numbers(_by_length(found), folder, "{:.0f} %")
    if found and gathered.trained_at is not None:
        back = findings.found_by_distance(rows, gathered.trained_at)
        yield f"{name} passkey back", Numbers(_by_length(back), folder, "{:.0f} %")


def _paper_far_text(
    entry: str, printed: Mapping[str, Mapping[str, float]], stored: Path
) -> Iterator[tuple[str, Numbers]]:
    told = findings.paper(entry)
    if told is None or told["metric"] != "perplexity":
        return
    contexts = {name: _above(comparisons.paper_contexts(row, NEAR)) for name, row in printed.items()}
    yield f"paper {entry} context", Numbers(contexts, stored, "{:+z.1f} %")
    if told["trained_at"] == NEAR[1]:
        losses = {name: {int(n): math.log(value) for n, value in row.items()} for name, row in printed.items()}
        far = {name: _above(comparisons.over_no_far_text(row, NEAR)) for name, row in losses.items()}
        yield f"paper {entry} far", Numbers(far, stored, "{:+z.1f} %")


def _above(ratios: Mapping[Any, float]) -> dict[str, float]:
    """In percent, by length or by band of lengths."""
    names = {key: "{}-{}".format(*key) if isinstance(key, tuple) else str(key) for key in ratios}
    return {names[key]: 100 * (ratio - 1) for key, ratio in ratios.items()}


def _by_length(found: Mapping[str, Mapping[int, list[float]]]) -> dict[str, dict[str, float]]:
    return {name: {str(n): statistics.mean(seeds) for n, seeds in row.items()} for name, row in found.items()}


def _deviations(found: Mapping[str, Mapping[int, list[float]]]) -> dict[str, dict[str, float]]:
    told = {
        name: {
            str(n): 100 * statistics.stdev(seeds) / statistics.mean(seeds)
            for n, seeds in row.items()
            if len(seeds) > 1 and all(map(math.isfinite, seeds))
        }
        for name, row in found.items()
    }
    squares: dict[str, list[float]] = {}
    for name, row in told.items():
        for length, deviation in row.items():
            squares.setdefault(length, []).extend([deviation**2] * (len(found[name][int(length)]) - 1))
    return {**told, "all": {length: math.sqrt(statistics.mean(own)) for length, own in squares.items()}}


def _means(found: list[tuple[str, str, float | None]]) -> dict[str, dict[str, float]]:
    """(variant, column, value) of all seeds → variant → column → mean."""
    values: dict[str, dict[str, list[float]]] = {}
    for variant, column, value in found:
        if value is not None:
            values.setdefault(variant, {}).setdefault(column, []).append(value)
    return {name: {column: statistics.mean(all_) for column, all_ in row.items()} for name, row in values.items()}


def _speeds(row: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    """Of a model that is read again there is no training of its own."""
    if row["variant"] not in row.get("again", {}):
        yield "training", row["training"].get("median_tokens_per_second")
    seconds, tokens = findings.reading(row)
    yield "reading", tokens / seconds if seconds else None
    for result in row["results"]:
        if result.get("seconds"):
            yield str(result["length"]), result["tokens"] / result["seconds"]


def _end(curve: list[tuple[int, float]]) -> float:
    return statistics.mean(loss for _, loss in curve[-max(len(curve) // 10, 1) :])


def _by_name(rows: list[dict[str, Any]], name: str, column: str, key: str, place: Path, form: str) -> Numbers:
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get(key) is not None:
            values.setdefault(row[name], {})[str(row[column])] = row[key]
    return Numbers(values, place, form)
