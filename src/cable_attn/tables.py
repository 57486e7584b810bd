"""One table of results in every form that people paste: a terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

Values = Mapping[str, Mapping[int, Sequence[float]]]
"""name → length → the values of all seeds."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def mean_text(found: Sequence[float], digits: int) -> str:
    """Mean and, of several, deviation."""
    if not found:
        return "–"
    told = f"{statistics.mean(found):.{digits}f}"
    if len(found) > 1 and all(map(math.isfinite, found)):
        told += f" ± {statistics.stdev(found):.{digits}f}"
    return told


@dataclass(frozen=True)
class LengthTable:
    """Names down, lengths across; mean and deviation over seeds; the best of each length stands out.

    ``paper``: name → length → its number, printed beside ours with the difference.
    """

    title: str
    values: Values
    trained_at: int | None
    paper: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    digits: int = 2
    lower_is_better: bool = True
    beside: Collection[str] = ()
    """Names that stand for comparison and never as the best."""
    note: str = ""
    """Ends the caption."""

    @property
    def lengths(self) -> list[int]:
        return sorted({length for row in self.values.values() for length in row})

    def header(self) -> list[str]:
        if self.trained_at is None:
            return [str(length) for length in self.lengths]
        return [f"{length} ({length / self.trained_at:g}×)" for length in self.lengths]

    @property
    def _compares(self) -> bool:
        return len(self.values) > 1

    def is_best(self, name: str, length: int) -> bool:
        """Also one that is told by the same digits."""
        rivals = [row[length] for other, row in self.values.items() if row.get(length) and other not in self.beside]
        finite = [mean for mean in map(statistics.fmean, rivals) if math.isfinite(mean)]
        if not finite or not self._compares or name in self.beside or not self.values[name].get(length):
            return False
        best = min(finite) if self.lower_is_better else max(finite)
        return f"{statistics.fmean(self.values[name][length]):.{self.digits}f}" == f"{best:.{self.digits}f}"

    def text(self, name: str, length: int) -> str:
        found = self.values[name].get(length)
        if not found:
            return "–"
        told = mean_text(found, self.digits)
        theirs = self.paper.get(name, {}).get(str(length))
        if theirs is not None:
            told += f" ({theirs:g}, {statistics.mean(found) - theirs:+.{self.digits}f})"
        return told

    @property
    def caption(self) -> str:
        better = "Lower" if self.lower_is_better else "Higher"
        told = "" if self.trained_at is None else f"Trained on {self.trained_at} tokens. "
        told += f"{better} is better"
        told += "; the best of each length in bold." if self._compares else "."
        seeds = {len(found) for row in self.values.values() for found in row.values()}
        if several := sorted(seeds - {0, 1}):
            count = f"{several[0]} to {several[-1]}" if len(several) > 1 else several[0]
            told += f" Mean ± deviation over {count} seeds{'; one seed where there is no ±' if 1 in seeds else ''}."
        if self.paper:
            told += " In brackets the paper's number and our difference to it."
        return f"{told} {self.note}".rstrip()

    def rich(self) -> Table:
        table = Table(title=self.title, caption=self.caption)
        table.add_column("")
        for column in self.header():
            table.add_column(column.replace(" ", "\n", 1), justify="right")
        for name in self.values:
            cells = [self.text(name, length) for length in self.lengths]
            bold = [self.is_best(name, length) for length in self.lengths]
            told = (f"[bold green]{cell}[/]" if best else cell for cell, best in zip(cells, bold))
            table.add_row(escape(name), *told)
        return table

    def markdown(self) -> str:
        lines = []
        for name in self.values:
            cells = [
                f"**{self.text(name, length)}**" if self.is_best(name, length) else self.text(name, length)
                for length in self.lengths
            ]
            lines.append([name.replace("|", "\\|"), *cells])
        return markdown_table(["encoding", *self.header()], lines)

    def latex(self) -> str:
        columns = " & ".join(column.replace("×", r"$\times$") for column in self.header())
        lines = [rf"\begin{{tabular}}{{l{'r' * len(self.lengths)}}}", r"\toprule", rf" & {columns} \\", r"\midrule"]
        for name in self.values:
            cells = []
            for length in self.lengths:
                cell = self.text(name, length).replace("±", r"$\pm$").replace("–", "--")
                cells.append(rf"\textbf{{{cell}}}" if self.is_best(name, length) else cell)
            escaped = re.sub(r"([_&%#$])", r"\\\1", name)
            lines.append(rf"{escaped} & {' & '.join(cells)} \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def csv(self) -> str:
        """A line for each name and length, with full precision."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["name", "length", "mean", "deviation", "seeds", "paper", "difference"])
        for name, row in self.values.items():
            for length in self.lengths:
                writer.writerow([name, length, *self._numbers(name, row.get(length) or [], length)])
        return out.getvalue()

    def _numbers(self, name: str, found: Sequence[float], length: int) -> list[Any]:
        theirs = self.paper.get(name, {}).get(str(length))
        paper = "" if theirs is None else theirs
        if not found:
            return ["", "", 0, paper, ""]
        mean = statistics.mean(found)
        deviation = statistics.stdev(found) if len(found) > 1 else ""
        return [mean, deviation, len(found), paper, "" if theirs is None else mean - theirs]
