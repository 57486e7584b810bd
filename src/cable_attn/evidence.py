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
    <!-- % books at 1024: alibi over cable -->   how far the one is from the other, in percent
    <!-- × books: rope@15360 over rope@1024 -->  how many times the other it is
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from cable_attn import claims, comparisons, findings, measured, summary
from cable_attn import study as studies
from cable_attn.cells import EVALUATION, baseline, results
from cable_attn.errors import CableError, unknown
from cable_attn.files import write_atomically
from cable_attn.study import Study
from cable_attn.summary import Figure, Gathered
from cable_attn.tables import LengthTable, markdown_table

NUMBER = re.compile(r"(?P<mark><!-- (?P<form>[=%×]) (?P<asked>[^>]+?) -->).*?<!-- end -->", re.DOTALL)
AT_BEGINNING = re.compile(r"^[\s>*-]*(<!-- [=%×] [^>]+ -->)", re.MULTILINE)
ASKED = re.compile(r"(?P<table>[^:]+?)(?: at (?P<column>[^:]+))?: (?P<one>\S.*?)(?: over (?P<other>\S.*))?")
CLAIMS = re.compile(r"<!-- claims -->.*?<!-- end -->", re.DOTALL)
MARK = re.compile(r"<!-- (study|table|figure) ([\w-]+)(?: ([\w-]+))? -->.*?<!-- end -->", re.DOTALL)


def fill(page: Path, stored: Path, figures: Path) -> list[Path]:
    """Rewrite the page and its figures; the paths that were written. ``stored``: the folder of the studies."""
    if not page.is_file():
        raise CableError(f"{str(page)!r} is no file.")
    written: list[Path] = []

    def block(found: re.Match[str]) -> str:
        kind, name, figure = found.groups()
        mark = found.group(0).split("-->", 1)[0] + "-->"
        told = Stored(stored, name, page, figures, written)
        content = {"study": told.section, "table": told.table, "figure": lambda: told.figure(figure)}[kind]()
        return f"{mark}\n{content}\n<!-- end -->"

    text = page.read_text(encoding="utf-8")
    if early := AT_BEGINNING.search(text):
        raise CableError(
            f"{early[1]} begins a line of {page.name}, which Markdown takes for HTML: put a word before it."
        )
    if NUMBER.search(text):
        known = measured.read(stored)
        text = NUMBER.sub(lambda found: _number(found, known, page), text)
    if CLAIMS.search(text):
        told = claims.table(stored, page)
        text = CLAIMS.sub(lambda found: f"<!-- claims -->\n{told}\n<!-- end -->", text)
    try:
        write_atomically(page, MARK.sub(block, text))
    except ImportError as error:
        raise CableError("figures need matplotlib: pip install 'cable-attn[plot]'.") from error
    return [page, *dict.fromkeys(written)]


def _number(found: re.Match[str], known: measured.Known, page: Path) -> str:
    mark, form, asked = found["mark"], found["form"], found["asked"]
    part = ASKED.fullmatch(asked)
    if part is None or (form == "=") != (part["other"] is None):
        raise CableError(
            f"{mark} in {page.name} is no number like '= books at 1024: cable', '% books at 1024: alibi over cable' or "
            "'× books: rope@15360 over rope@1024'."
        )
    names = [name for name in (part["one"], part["other"]) if name is not None]
    wanted = [(name, part["column"]) if part["column"] else _parted(name, mark, page) for name in names]
    return f"{mark}{_told(form, measured.find(known, part['table'], wanted, page.name))}<!-- end -->"


def _parted(name: str, mark: str, page: Path) -> tuple[str, str]:
    before, at, column = name.rpartition("@")
    if not at:
        raise CableError(
            f"{mark} in {page.name} names no column: write 'TABLE at COLUMN: NAME' or 'TABLE: NAME@COLUMN'."
        )
    return before, column


def _told(form: str, found: measured.Found) -> str:
    if form == "=":
        return found.texts[0]
    ratio = found.values[0] / found.values[1]
    if form == "×":
        return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
    percent = 100 * abs(ratio - 1)
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.1f} %" if percent >= 0.05 else f"{percent:.1g} %"


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
        rows = list(results(self.study, self.folder))
        if not rows:
            raise CableError(f"{str(self.folder)!r} holds no results yet.")
        paper = findings.paper(self.study.paper)
        self.gathered = Gathered(
            self.study.title,
            rows,
            {},
            paper["rows"] if paper else {},
            baseline(self.folder),
            self.study.against,
        )

    def section(self) -> str:
        tables = [_with_caption(table) for table in self.tables()]
        tables += [comparisons.speeds(self.gathered)] if self.study.speeds else []
        tables += filter(None, (comparisons.ratios(self.gathered), comparisons.far_context(self.gathered)))
        pictures = [self._picture(figure) for figure in summary.figures(self.gathered)]
        return "\n\n".join([*tables, *pictures, self._runs(), self._source()])

    def table(self) -> str:
        return _with_caption(self.tables()[0])

    def tables(self) -> list[LengthTable]:
        tables = list(summary.length_tables(self.gathered).values())
        return tables + ([self._growth()] if self.study.like and self.gathered.trained_at else [])

    def figure(self, name: str | None) -> str:
        known = {figure.name: figure for figure in summary.figures(self.gathered)}
        if name not in known:
            raise unknown(f"figure of {self.study.name!r}", str(name), list(known))
        return self._picture(known[name])

    def _growth(self) -> LengthTable:
        """Ours and the paper's on other data, each over its own value at the training length."""
        at, entry = self.gathered.trained_at, findings.paper(self.study.like)
        assert at is not None and entry is not None
        ours = {
            name: {length: [value / row[at]] for length, value in row.items()}
            for name, row in summary.mean_perplexities(self.gathered.rows).items()
            if at in row
        }
        theirs = {
            name: {length: value and round(value / row[str(at)], 3) for length, value in row.items()}
            for name, row in entry["rows"].items()
            if row.get(str(at))
        }
        title = f"Perplexity over that at {at} tokens. The paper's, {entry['where']}: {entry['what']}"
        return LengthTable(title, ours, at, theirs, digits=3, marks_best=False)

    def _picture(self, figure: Figure) -> str:
        target = self.figures / f"{self.study.name}-{figure.name}.svg"
        if target not in self.written:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.written += figure.draw(target)
        return f"![{self.study.title}: {figure.caption}]({self._link(target)})\n\n*{figure.caption}*"

    def _runs(self) -> str:
        """What was trained, for how long, and the file behind it."""
        lines = [self._run(row) for row in self.gathered.rows]
        header = (
            "run",
            *(head for head, _ in summary.TRAINING.values()),
            "read in s",
            "read tokens/s",
            "GPU",
            "commit",
        )
        return f"<details><summary>The runs</summary>\n\n{markdown_table(header, lines)}\n\n</details>"

    def _run(self, row: dict[str, Any]) -> list[str]:
        folders = {cell.name: cell.folder(self.folder) for cell in self.study.cells()}
        file = folders[row["cell"]] / EVALUATION
        told = [summary.told(row["training"].get(key), form) for key, (_, form) in summary.TRAINING.items()]
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
        return told + (f" Not run yet: {left} of {len(self.study.cells())} cells." if left else "")

    def _link(self, target: Path) -> str:
        return Path(os.path.relpath(target, self.page.parent)).as_posix()


def _with_caption(table: LengthTable) -> str:
    return f"**{table.title}**\n\n{table.markdown()}\n\n{table.caption}"
