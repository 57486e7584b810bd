"""``docs/claims.md``: each claim of the paper, what our stored runs say of it, and the file behind that.

``claims.toml`` beside the studies has for each claim comparisons of stored numbers, or a verdict in words where nothing
was measured that could decide it:

    [[claim]]
    number = 9
    tests = ["books at 1024, 15360: cable < cable-nw | alibi", "books: cable@15360 < 0.99 * cable@1024"]

The first asks the same of several columns and rivals, the second compares two columns; ``~`` is about the same, within
a fifth. ``measured.py`` lists the tables. Of several seeds it is the mean, and both numbers are of one run. A verdict
beside tests is the best that these can show; one that holds nothing stands whatever they show. What follows from the
formulae has a test: ``shown_by = "tests/FILE.py::NAME"``, and a verdict.
"""

from __future__ import annotations

import operator
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cable_attn import findings, measured
from cable_attn.errors import CableError, require_known
from cable_attn.measured import CLAIMS as FILE
from cable_attn.measured import Known
from cable_attn.tables import markdown_table

VERDICTS = ("holds", "holds in part", "not at this scale", "refuted", "not measured")
SETTLED = VERDICTS[2:]
"""Which no comparison changes."""
ABOUT = 0.2
"""How far two numbers may lie apart that are about the same."""
OPERATORS = {"<": operator.lt, ">": operator.gt, "~": lambda one, other: abs(one - other) <= ABOUT * abs(other)}
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
    def share(self) -> float:
        """Of the comparisons, how many came out so."""
        return sum(outcome.holds for outcome in self.outcomes) / len(self.outcomes)

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


def table(stored: Path, page: Path) -> str:
    """How many hold, and all of them, as Markdown."""
    said, known = _read(stored / FILE), measured.read(stored)
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
    part = [one for one in judged if one.verdict == "holds in part" and one.outcomes]
    every = sum(one.share == 1 for one in part)
    most = sum(one.share > 0.5 for one in part) - every
    told = (
        f"Of those that hold in part and were compared, {every} came out in every comparison, on less than they speak "
        f"of, {most} in more than half and {len(part) - every - most} in half of them or fewer."
    )
    return f"Of {len(verdicts)} claims: {', '.join(counts)}." + (f" {told}" if part else "")


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
    told = measured.find(known, one.table, ((one.left, one.at), (one.right, one.by)), FILE)
    left, right = told.texts
    factor = f"{one.factor} × " if one.factor else ""
    if one.at == one.by:
        words = f"{one.table} at {one.at}: {one.left} {left}", f"{factor}{one.right} {right}"
    else:
        words = f"{one.table}: {one.left} at {one.at} {left}", f"{factor}{one.right} at {one.by} {right}"
    holds = OPERATORS[one.sign](told.values[0], float(one.factor or 1) * told.values[1])
    return Outcome(holds, f"{words[0]} {one.sign.replace('~', '≈')}", words[1], told.place)
