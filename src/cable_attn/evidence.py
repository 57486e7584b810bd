"""``docs/results.md``: what stands between its marks is made from stored results of studies, and from nothing else.

A folder holds studies, ``NAME.toml``, and what their cells have found, ``results/NAME/CELL/evaluation.json``; also of
studies that come with the package. In a page

    <!-- study NAME -->          all of a study: tables, figures, its runs with hardware and time
    <!-- table NAME -->          its first table only
    <!-- figure NAME FIGURE -->  one figure only
    <!-- claims -->              the paper's claims and what the results say of them

each up to ``<!-- end -->``, are written anew. All pages share one folder of figures. Within a sentence, of
the tables that ``measured.py`` lists,

    <!-- = books at 1024: cable -->              the number
    <!-- +% books at 1024: alibi over cable -->  how far it is above the other, in percent; -% below, % from
    <!-- × books: rope@15360 over rope@1024 -->  how many times the other it is
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from cable_attn import claims, comparisons, findings, measured, summary
from cable_attn import study as studies
from cable_attn.cells import EVALUATION
from cable_attn.errors import CableError, unknown
from cable_attn.files import write_atomically
from cable_attn.study import Study
from cable_attn.summary import Figure
from cable_attn.tables import LengthTable, markdown_table

END = "<!-- end -->"
INSIDE = r"(?:(?!<!--).)*"
"""No other mark: one whose end is missing would swallow what follows."""
NUMBER = re.compile(rf"(?P<mark><!-- (?P<form>=|[+-]?%|×) (?P<asked>[^>]+?) -->){INSIDE}{END}", re.DOTALL)
AT_BEGINNING = re.compile(r"^(?:[\s>*+-]|\d+[.)])*(<!-- (?:=|[+-]?%|×) [^>]+ -->)", re.MULTILINE)
ASKED = re.compile(r"(?P<table>[^:]+?)(?: at (?P<column>[^:]+))?: (?P<one>\S.*?)(?: over (?P<other>\S.*))?")
CLAIMS = re.compile(rf"<!-- claims -->{INSIDE}{END}", re.DOTALL)
MARK = re.compile(rf"<!-- (study|table|figure) ([\w-]+)(?: ([\w-]+))? -->{INSIDE}{END}", re.DOTALL)


def fill(page: Path, stored: Path, figures: Path) -> list[Path]:
    """Rewrite the page and its figures; the paths that were written. ``stored``: the folder of the studies."""
    if not page.is_file():
        raise CableError(f"{str(page)!r} is no file. Give --pages, or a study: cable study report FILE.")
    written: list[Path] = []

    def block(found: re.Match[str]) -> str:
        kind, name, figure = found.groups()
        mark = found.group(0).split("-->", 1)[0] + "-->"
        told = Stored(stored, name, page, figures, written)
        content = {"study": told.section, "table": told.table, "figure": lambda: told.figure(figure)}[kind]()
        return f"{mark}\n{content}\n{END}"

    text = page.read_text(encoding="utf-8")
    _require_whole(text, page)
    if NUMBER.search(text):
        known = measured.read(stored)
        text = NUMBER.sub(lambda found: _number(found, known, page), text)
    if CLAIMS.search(text):
        told = claims.table(stored, page)
        text = CLAIMS.sub(lambda found: f"<!-- claims -->\n{told}\n{END}", text)
    try:
        write_atomically(page, MARK.sub(block, text))
    except ImportError as error:
        raise CableError("figures need matplotlib: pip install 'cable-attn[plot]'.") from error
    return [page, *dict.fromkeys(written)]


def _require_whole(text: str, page: Path) -> None:
    """Each mark has its end, and stands where Markdown leaves it alone."""
    if early := AT_BEGINNING.search(text):
        raise CableError(
            f"{early[1]} begins a line of {page.name}, which Markdown takes for HTML: put a word before it."
        )
    for pattern in (NUMBER, CLAIMS, MARK):
        text = pattern.sub("", text)
    if left := re.search(r"<!-- .*?-->", text, re.DOTALL):
        raise CableError(
            f"{left[0]} in {page.name} is no mark that is known, or one of a pair alone: each ends with {END}."
        )


def _number(found: re.Match[str], known: measured.Known, page: Path) -> str:
    mark, form, asked = found["mark"], found["form"], " ".join(found["asked"].split())
    part = ASKED.fullmatch(asked)
    if part is None or (form == "=") != (part["other"] is None):
        raise CableError(
            f"{mark} in {page.name} is no number like '= books at 1024: cable', '% books at 1024: alibi over cable' or "
            "'× books: rope@15360 over rope@1024'."
        )
    names = [name for name in (part["one"], part["other"]) if name is not None]
    wanted = [(name, part["column"]) if part["column"] else _parted(name, mark, page) for name in names]
    numbers = measured.find(known, part["table"], wanted, page.name)
    told = numbers.texts[0] if form == "=" else _over(form, numbers.values, f"{mark} in {page.name}")
    return f"{mark}{told}{END}"


def _parted(name: str, mark: str, page: Path) -> tuple[str, str]:
    before, at, column = name.rpartition("@")
    if not at:
        raise CableError(
            f"{mark} in {page.name} names no column: write 'TABLE at COLUMN: NAME' or 'TABLE: NAME@COLUMN'."
        )
    return before, column


def _over(form: str, values: list[float], where: str) -> str:
    one, other = values
    if not other:
        raise CableError(f"{where}: nothing can be told over {other:g}. Tell both numbers.")
    ratio = one / other
    if form == "×":
        return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    percent = 100 * (ratio - 1)
    if form != "%" and (percent > 0) != (form == "+%"):
        raise CableError(f"{where} is {percent:.2g} %: the sentence says that it lies on the other side.")
    percent = abs(percent)
    digits = 0 if percent >= 10 or not percent else max(1, -math.floor(math.log10(percent)))
    return f"{percent:.{digits}f} %"


class Stored:
    """One study's results, as Markdown for a page."""

    def __init__(self, stored: Path, name: str, page: Path, figures: Path, written: list[Path]):
        own = sorted(path.stem for path in stored.glob("*.toml") if path.name != claims.FILE)
        known = own + [other for other in studies.builtin() if (stored / "results" / other).is_dir()]
        if name not in known:
            raise unknown("stored study", name, known)
        self.study: Study = studies.load(str(stored / f"{name}.toml") if name in own else name, checked=False)
        self.folder = stored / "results" / name
        self.page, self.figures, self.written = page, figures, written
        self.gathered = summary.gather_study(self.study, self.folder)
        if self.study.trained_by:  # that study tells of the training
            self.gathered = replace(self.gathered, rows=[{**row, "training": {}} for row in self.gathered.rows])
        if not self.gathered.rows:
            raise CableError(f"{str(self.folder)!r} holds no results yet.")

    def section(self) -> str:
        tables = [_with_caption(table) for table in self.tables()]
        tables += [comparisons.speeds(self.gathered)] if self.study.speeds else []
        tables += filter(None, (comparisons.ratios(self.gathered), comparisons.contexts(self.gathered)))
        pictures = [self._picture(figure) for figure in summary.figures(self.gathered)]
        return "\n\n".join([*tables, *pictures, self._runs(), self._source()])

    def table(self) -> str:
        return _with_caption(self.tables()[0])

    def tables(self) -> list[LengthTable]:
        tables = list(summary.length_tables(self.gathered).values())
        return tables + ([self._paper()] if self.study.like else [])

    def figure(self, name: str | None) -> str:
        known = {figure.name: figure for figure in summary.figures(self.gathered)}
        if name not in known:
            raise unknown(f"figure of {self.study.name!r}", str(name), list(known))
        return self._picture(known[name])

    def _paper(self) -> LengthTable:
        """The paper's own table, on other data."""
        entry = findings.paper(self.study.like)
        assert entry is not None
        known = {
            name: {int(length): [value] for length, value in row.items() if value}
            for name, row in entry["rows"].items()
        }
        values = {name: known[name] for name in self.gathered_names() if name in known}
        return LengthTable(f"The paper's, {entry['where']}: {entry['what']}", values, entry["trained_at"])

    def gathered_names(self) -> list[str]:
        return list(dict.fromkeys(row["variant"] for row in self.gathered.rows))

    def _picture(self, figure: Figure) -> str:
        target = self.figures / f"{self.study.name}-{figure.name}.svg"
        if target not in self.written:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.written += figure.draw(target)
        return f"![{self.study.title}: {figure.caption}]({self._link(target)})\n\n*{figure.caption}*"

    def _runs(self) -> str:
        """What was trained, for how long, and the file behind it."""
        known = {} if self.study.trained_by else summary.TRAINING
        lines = [self._run(row, known) for row in self.gathered.rows]
        header = ("run", *(head for head, _ in known.values()), "read in s", "read tokens/s", "GPU", "commit")
        told = [*filter(None, [comparisons.learning(self.gathered)]), markdown_table(header, lines)]
        return "\n\n".join(["<details><summary>The runs</summary>", *told, "</details>"])

    def _run(self, row: dict[str, Any], known: dict[str, tuple[str, str]]) -> list[str]:
        folders = {cell.name: cell.folder(self.folder) for cell in self.study.cells()}
        file = folders[row["cell"]] / EVALUATION
        told = [summary.told(row["training"].get(key), form) for key, (_, form) in known.items()]
        seconds, tokens = findings.reading(row)
        told += [f"{seconds:.0f}", f"{tokens / seconds:,.0f}"] if seconds else ["–", "–"]
        return [f"[{row['cell']}]({self._link(file)})", *told, row.get("gpu") or "CPU", row["commit"] or "–"]

    def _source(self) -> str:
        versions = dict.fromkeys(
            ", ".join(f"{name} {version}" for name, version in row["versions"].items()) for row in self.gathered.rows
        )
        left = len(self.study.cells()) - len(self.gathered.rows)
        file = self.folder.parent.parent / f"{self.study.name}.toml"
        study = f"[{file.name}]({self._link(file)})" if file.is_file() else f"`cable study run {self.study.name}`"
        told = f"{study} with {'; '.join(versions)}."
        told += f" The models are those of *{self.study.trained_by}*." if self.study.trained_by else ""
        return told + (f" Not run yet: {left} of {len(self.study.cells())} cells." if left else "")

    def _link(self, target: Path) -> str:
        return Path(os.path.relpath(target, self.page.parent)).as_posix()


def _with_caption(table: LengthTable) -> str:
    return f"**{table.title}**\n\n{table.markdown()}\n\n{table.caption}"
