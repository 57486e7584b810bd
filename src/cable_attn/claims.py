"""``docs/claims.md``: each claim of the paper, what our stored runs say of it, and the file behind that.

``claims.toml`` beside the studies has for each claim comparisons of stored numbers, or a verdict in words where nothing
was measured that could decide it:

    [[claim]]
    number = 9
    tests = ["books: cable@15360 < cable-nw@15360", "training: cable@small > 0.97 * rope@small"]

A table is a study (perplexity), ``STUDY COLLECTION`` (nDCG@10), ``STUDY loss`` (held out @end, in training @half way),
``STUDY contrastive`` (the last tenth of its curve, @end), ``STUDY speed`` (tokens a second, @training and @reading, of
one that has ``speeds``), ``training``, ``memory`` and ``parameters`` of ``cable bench train`` by size, or ``decode``
and ``prefill`` of ``cable bench`` by length, both numbers from the last run that has them. Of several seeds it is the
mean. A verdict beside tests is the best that these can show; one that holds nothing stands whatever they show. What
follows from the formulae has a test: ``shown_by = "tests/FILE.py::NAME"``, and a verdict.
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
OPERATORS = {"<": operator.lt, ">": operator.gt}
COMPARISON = re.compile(
    r"(?P<table>[^:]+): (?P<left>\S[^<>]*)@(?P<at>[^@\s]+) (?P<sign>[<>]) "
    r"(?:(?P<factor>[\d.]+) \* )?(?P<right>\S.*)@(?P<by>[^@\s]+)"
)


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
    """All claims as Markdown."""
    said = _read(stored / FILE)
    known: dict[str, list[Numbers]] = {}
    for name, numbers in _numbers(stored):
        known.setdefault(name, []).append(numbers)
    lines = []
    for number, claim in enumerate(findings.claims(), 1):
        entry = said.get(number, {})
        verdict, found, places = _judge(entry, known)
        if "shown_by" in entry:
            places.append(_test(entry["shown_by"], stored.parent))
        links = [f"[{place.name}]({Path(os.path.relpath(place, page.parent)).as_posix()})" for place in places]
        cells = (str(number), claim["claim"], claim["where"], f"**{verdict}**", found, ", ".join(links))
        lines.append([cell.replace("|", "\\|") for cell in cells])
    return markdown_table(("", "the paper says", "where", "here", "measured", "stored in"), lines)


def _read(path: Path) -> dict[int, dict[str, Any]]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CableError(f"{str(path)!r} cannot be read: {error}") from error
    return {entry["number"]: entry for entry in tree["claim"]}


def _judge(said: dict[str, Any], known: Known) -> tuple[str, str, list[Path]]:
    """The verdict, the numbers, and the files."""
    best = said.get("verdict", "holds" if "tests" in said else "not measured")
    require_known(f"verdict in {FILE}", best, VERDICTS)
    if not said.get("tests"):
        return best, said.get("why", ""), []
    outcomes = [_compare(text, known) for text in said["tests"]]
    passed = sum(holds for holds, _, _ in outcomes)
    verdict = best
    if passed < len(outcomes) and best not in SETTLED:
        verdict = "holds in part" if passed else "refuted"
    told = "; ".join(text if holds else f"not: {text}" for holds, text, _ in outcomes)
    why = f" {said['why']}" if "why" in said else ""
    return verdict, f"{told}.{why}", list(dict.fromkeys(place for _, _, place in outcomes))


def _test(name: str, root: Path) -> Path:
    file, _, function = name.partition("::")
    path = root / file
    if not path.is_file() or f"def {function}(" not in path.read_text(encoding="utf-8"):
        raise CableError(f"shown_by in {FILE}: there is no test {name!r}.")
    return path


def _compare(text: str, known: Known) -> tuple[bool, str, Path]:
    found = COMPARISON.fullmatch(text)
    if found is None:
        raise CableError(f"{text!r} in {FILE} is no comparison like 'books: cable@1024 < alibi@1024'.")
    part = found.groupdict()
    if part["table"] not in known:
        raise unknown(f"table in {FILE}", part["table"], list(known))
    runs, wanted = known[part["table"]], ((part["left"], part["at"]), (part["right"], part["by"]))
    numbers = next((run for run in runs if all(run.has(*one) for one in wanted)), runs[0])
    left, right = _value(numbers, part["left"], part["at"]), _value(numbers, part["right"], part["by"])
    holds = OPERATORS[part["sign"]](left, float(part["factor"] or 1) * right)
    one, other = (numbers.form.format(value) for value in (left, right))
    factor = f"{part['factor']} × " if part["factor"] else ""
    sign = part["sign"]
    told = (
        f"{part['table']}: {part['left']} at {part['at']} {one} {sign} {factor}{part['right']} at {part['by']} {other}"
    )
    return holds, told, numbers.place


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
