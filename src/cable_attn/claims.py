"""``docs/claims.md``: each claim of the paper, what our stored runs say of it, and the file behind that.

``claims.toml`` beside the studies has for each claim comparisons of stored numbers, or a verdict in words where nothing
was measured that could decide it:

    [[claim]]
    number = 9
    tests = ["books at 1024, 15360: cable < cable-nw | alibi", "books: cable@15360 < 0.99 * cable@1024"]

The first asks the same of several columns and rivals, the second compares two columns; ``~`` is about the same, within
a fifth. The tables:

    STUDY                             perplexity, by length
    STUDY COLLECTION                  nDCG@10, by length
    STUDY loss                        held out at the ``end``, in training ``half`` way
    STUDY contrastive                 of fine-tuning, the last tenth of its curve: ``end``
    STUDY speed, STUDY memory         of one with ``speeds``: tokens a second in ``training`` and ``reading``, MiB
    training, memory, parameters      of ``cable bench train``, by size
    decode, prefill                   of ``cable bench``, by length; both numbers from the last run that has them

Of several seeds it is the mean. A verdict beside tests is the best that these can show; one that holds nothing stands
whatever they show. What follows from the formulae has a test: ``shown_by = "tests/FILE.py::NAME"``, and a verdict.
"""

from __future__ import annotations

import operator
import os
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cable_attn import findings, summary
from cable_attn import study as studies
from cable_attn.bench import records
from cable_attn.cells import results
from cable_attn.errors import CableError, require_known, unknown
from cable_attn.tables import markdown_table

FILE = "claims.toml"
VERDICTS = ("holds", "holds in part", "not at this scale", "refuted", "not measured")
SETTLED = VERDICTS[2:]
"""Which no comparison changes."""
ABOUT = 0.2
"""How far two numbers may lie apart that are about the same."""
OPERATORS = {"<": operator.lt, ">": operator.gt, "~": lambda one, other: abs(one / other - 1) <= ABOUT}
LINE = "<br>"
"""Begins a new line in a cell of a table."""
FACTOR = r"(?:(?P<factor>[\d.]+) \* )?"
ONE_COLUMN = re.compile(
    rf"(?P<table>[^:]+?) at (?P<columns>[^:]+): (?P<left>\S[^<>~]*) (?P<sign>[<>~]) {FACTOR}(?P<rights>\S.*)"
)
TWO_COLUMNS = re.compile(
    rf"(?P<table>[^:]+): (?P<left>\S[^<>~]*)@(?P<at>[^@\s]+) (?P<sign>[<>~]) {FACTOR}(?P<right>\S.*)@(?P<by>[^@\s]+)"
)


@dataclass(frozen=True)
class Comparison:
    table: str
    left: str
    at: str
    sign: str
    factor: str | None
    right: str
    by: str


@dataclass(frozen=True)
class Outcome:
    """``before`` and ``after``: what was compared, up to its sign and behind it."""

    holds: bool
    before: str
    after: str
    place: Path


@dataclass(frozen=True)
class Judgement:
    verdict: str
    why: str
    outcomes: list[Outcome]

    @property
    def came_out(self) -> bool:
        """Every comparison, as claimed."""
        return bool(self.outcomes) and all(outcome.holds for outcome in self.outcomes)

    @property
    def places(self) -> list[Path]:
        return list(dict.fromkeys(outcome.place for outcome in self.outcomes))

    @property
    def short(self) -> str:
        passed = sum(outcome.holds for outcome in self.outcomes)
        return f"**{self.verdict}**" + (f"{LINE}{passed} of {len(self.outcomes)}" if self.outcomes else "")

    @property
    def measured(self) -> str:
        """A line for all that one number was compared with, and why."""
        lines: dict[tuple[bool, str], list[str]] = {}
        for outcome in self.outcomes:
            lines.setdefault((outcome.holds, outcome.before), []).append(outcome.after)
        told = [f"{'✓' if holds else '✗'} {before} {', '.join(after)}" for (holds, before), after in lines.items()]
        return LINE.join([*told, self.why] if self.why else told)


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


def table(stored: Path, page: Path) -> str:
    """How many hold, and all of them, as Markdown."""
    said = _read(stored / FILE)
    known: dict[str, list[Numbers]] = {}
    for name, numbers in _numbers(stored):
        known.setdefault(name, []).append(numbers)
    lines, judged = [], []
    for number, claim in enumerate(findings.claims(), 1):
        entry = said.get(number, {})
        one = _judge(entry, known)
        places = one.places + ([_test(entry["shown_by"], stored.parent)] if "shown_by" in entry else [])
        links = [f"[{place.name}]({Path(os.path.relpath(place, page.parent)).as_posix()})" for place in places]
        claimed = f"{claim['claim']}{LINE}*{claim['where']}*"
        cells = (str(number), claimed, one.short, one.measured, LINE.join(links))
        lines.append([cell.replace("|", "\\|") for cell in cells])
        judged.append(one)
    header = ("", "the paper says", "here", "measured", "stored in")
    return f"{_counts(judged)}\n\n{markdown_table(header, lines)}"


def _counts(judged: list[Judgement]) -> str:
    verdicts = [one.verdict for one in judged]
    counts = [f"{verdicts.count(verdict)} *{verdict}*" for verdict in VERDICTS if verdict in verdicts]
    capped = sum(one.verdict == "holds in part" and one.came_out for one in judged)
    told = f" Of those that hold in part, {capped} have every comparison, on less than they speak of." if capped else ""
    return f"Of {len(verdicts)} claims: {', '.join(counts)}.{told}"


def _read(path: Path) -> dict[int, dict[str, Any]]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CableError(f"{str(path)!r} cannot be read: {error}") from error
    return {entry["number"]: entry for entry in tree["claim"]}


def _judge(said: dict[str, Any], known: Known) -> Judgement:
    best, why = said.get("verdict", "holds" if "tests" in said else "not measured"), said.get("why", "")
    require_known(f"verdict in {FILE}", best, VERDICTS)
    outcomes = [_compare(one, known) for text in said.get("tests", []) for one in _comparisons(text)]
    passed = sum(outcome.holds for outcome in outcomes)
    if passed < len(outcomes) and best not in SETTLED:
        best = "holds in part" if passed else "refuted"
    return Judgement(best, why, outcomes)


def _test(name: str, root: Path) -> Path:
    file, _, function = name.partition("::")
    path = root / file
    if not path.is_file() or f"def {function}(" not in path.read_text(encoding="utf-8"):
        raise CableError(f"shown_by in {FILE}: there is no test {name!r}.")
    return path


def _comparisons(text: str) -> list[Comparison]:
    if found := ONE_COLUMN.fullmatch(text):
        part = found.groupdict()
        columns, rights = part.pop("columns").split(", "), part.pop("rights").split(" | ")
        return [Comparison(**part, at=column, by=column, right=right) for column in columns for right in rights]
    if found := TWO_COLUMNS.fullmatch(text):
        return [Comparison(**found.groupdict())]
    raise CableError(
        f"{text!r} in {FILE} is no comparison like 'books at 1024: cable < alibi' or 'books: cable@2048 < cable@1024'."
    )


def _compare(one: Comparison, known: Known) -> Outcome:
    if one.table not in known:
        raise unknown(f"table in {FILE}", one.table, list(known))
    runs, wanted = known[one.table], ((one.left, one.at), (one.right, one.by))
    numbers = next((run for run in runs if all(run.has(*name) for name in wanted)), runs[0])
    values = [_value(numbers, *name) for name in wanted]
    left, right = (numbers.form.format(value) for value in values)
    factor = f"{one.factor} × " if one.factor else ""
    if one.at == one.by:
        told = f"{one.table} at {one.at}: {one.left} {left}", f"{factor}{one.right} {right}"
    else:
        told = f"{one.table}: {one.left} at {one.at} {left}", f"{factor}{one.right} at {one.by} {right}"
    holds = OPERATORS[one.sign](values[0], float(one.factor or 1) * values[1])
    return Outcome(holds, f"{told[0]} {one.sign.replace('~', '≈')}", told[1], numbers.place)


def _value(numbers: Numbers, name: str, column: str) -> float:
    if name not in numbers.values:
        raise unknown(f"name in {FILE}", name, list(numbers.values))
    row = numbers.values[name]
    if column not in row:
        raise unknown(f"column of {name!r} in {FILE}", column, list(row))
    return row[column]


def _numbers(stored: Path) -> Iterator[tuple[str, Numbers]]:
    for file in sorted(stored.glob("*.toml")):
        folder = stored / "results" / file.stem
        if file.name != FILE and folder.is_dir():
            yield from _of_study(studies.load(str(file), checked=False), folder)
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
    rows = list(results(study, folder))
    perplexities = summary.mean_perplexities(rows)
    if perplexities:
        values = {name: {str(length): value for length, value in row.items()} for name, row in perplexities.items()}
        yield study.name, Numbers(values, folder)
    losses = [(row["variant"], "end", row["training"].get("eval_loss")) for row in rows]
    losses += [(row["variant"], "half", _half_way(row["training"].get("curve"))) for row in rows]
    yield f"{study.name} loss", Numbers(_means(losses), folder, "{:.3f}")
    if study.speeds:
        told = [(row["variant"], what, value) for row in rows for what, value in _speeds(row).items()]
        yield f"{study.name} speed", Numbers(_means(told), folder, "{:,.0f}")
        memory = [(row["variant"], "training", row["training"].get("peak_memory_mib")) for row in rows]
        yield f"{study.name} memory", Numbers(_means(memory), folder, "{:,.0f}")
    tuned = _means([(row["variant"], "end", _end(row["fine_tuning"]["curve"])) for row in rows if "fine_tuning" in row])
    if tuned:
        yield f"{study.name} contrastive", Numbers(tuned, folder, "{:.3f}")
    for collection in dict.fromkeys(name for row in rows for name in row.get("retrieval", {})):
        found = findings.found_documents(rows, collection)
        means = {name: {str(n): statistics.mean(all_) for n, all_ in row.items()} for name, row in found.items()}
        yield f"{study.name} {Path(collection).name}", Numbers(means, folder)


def _means(found: list[tuple[str, str, float | None]]) -> dict[str, dict[str, float]]:
    """(variant, column, value) of all seeds → variant → column → mean."""
    values: dict[str, dict[str, list[float]]] = {}
    for variant, column, value in found:
        if value is not None:
            values.setdefault(variant, {}).setdefault(column, []).append(value)
    return {name: {column: statistics.mean(all_) for column, all_ in row.items()} for name, row in values.items()}


def _speeds(row: dict[str, Any]) -> dict[str, float | None]:
    seconds, tokens = findings.reading(row)
    return {
        "training": row["training"].get("median_tokens_per_second"),
        "reading": tokens / seconds if seconds else None,
    }


def _half_way(curve: list[tuple[int, float]] | None) -> float | None:
    return _end(curve[: max(len(curve) // 2, 1)]) if curve else None


def _end(curve: list[tuple[int, float]]) -> float:
    return statistics.mean(loss for _, loss in curve[-max(len(curve) // 10, 1) :])


def _by_name(rows: list[dict[str, Any]], name: str, column: str, key: str, place: Path, form: str) -> Numbers:
    values: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get(key) is not None:
            values.setdefault(row[name], {})[str(row[column])] = row[key]
    return Numbers(values, place, form)
