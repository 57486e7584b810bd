"""``cable report``: a run or a study as one HTML page, from what is stored in its folder and nothing else."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from cable_attn import findings
from cable_attn import recipe as recipes
from cable_attn.cells import EVALUATION, FAILURE, baseline, results, training_record
from cable_attn.errors import CableError
from cable_attn.files import read_json, write_atomically
from cable_attn.report import MOST_POINTS, WORST, Curves, loss_figure, passkey_figure, perplexity_figure, place_figure
from cable_attn.study import Study
from cable_attn.tables import LengthTable

FILE = "report.html"
WORDS = "bm25, whole documents"
ENVIRONMENT = ("commit", "gpu", "python", "versions")
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 1.5rem auto; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; margin: 0.6rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid GrayText; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1rem 0; } figcaption, .note { font-size: 0.9rem; }
img { max-width: 100%; background: white; border-radius: 6px; }
code { font-size: 0.85rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Gathered:
    """A folder's runs. ``rows`` are like those of ``evaluation.json``; a run that was not read has no results."""

    title: str
    rows: list[dict[str, Any]]
    failures: dict[str, str]
    paper: Mapping[str, Mapping[str, float | None]]
    words: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """BM25's numbers for each collection."""
    against: Mapping[str, str] = field(default_factory=dict)
    """Variant → the one that its perplexity is told over; default: of all over the first."""
    like: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """The paper's numbers on other data."""

    @property
    def paper_rows(self) -> Mapping[str, Mapping[str, float | None]]:
        return self.paper or self.like

    @property
    def trained_at(self) -> int | None:
        """None: not all at one length."""
        lengths = {int(row["settings"]["recipe"]["data"]["length"]) for row in self.rows}
        return lengths.pop() if len(lengths) == 1 else None


@dataclass(frozen=True)
class Figure:
    """``name``: of its file."""

    name: str
    caption: str
    function: Callable[..., list[Path]]
    content: tuple[Any, ...]
    labels: tuple[str, ...] = ()

    def draw(self, stem: Path) -> list[Path]:
        return self.function(*self.content, stem, *self.labels)


def gather_study(study: Study, folder: Path) -> Gathered:
    """What a study's cells have found so far."""
    rows = list(results(study, folder))
    paper, like = (findings.paper(name) or {"rows": {}} for name in (study.paper, study.like))
    found = Gathered(study.title, rows, failures(folder), paper["rows"], baseline(folder), study.against)
    same_lengths = rows and like.get("trained_at") == found.trained_at  # otherwise they mean something else
    return replace(found, like=like["rows"]) if same_lengths else found


def gather(folder: Path, title: str = "", paper: Mapping[str, Mapping[str, float | None]] | None = None) -> Gathered:
    """What a run folder, or a folder of runs, holds."""
    rows = [_row(run) for run in _runs(folder)]
    return Gathered(title or folder.resolve().name, rows, failures(folder), paper or {}, baseline(folder))


def _runs(folder: Path) -> list[Path]:
    """The folder itself, or the runs one below; those of cable first."""
    if not folder.is_dir():
        raise CableError(f"{str(folder)!r} is no folder. Give a run folder of cable train, or the folder of a study.")
    below = sorted(folder.iterdir(), key=lambda path: (not path.name.startswith("cable"), path.name))
    runs = [folder] if _is_run(folder) else [path for path in below if path.is_dir() and _is_run(path)]
    if not runs:
        raise CableError(f"{str(folder)!r} holds no run yet: no metrics.jsonl or {EVALUATION} in it or one below.")
    return runs


def length_tables(gathered: Gathered) -> dict[str, LengthTable]:
    """Every table with a column for each length; the names make file names."""
    tables = {}
    values = findings.by_variant(gathered.rows)
    if values:
        tables["table"] = LengthTable(gathered.title, values, gathered.trained_at, gathered.paper)
    found_documents = retrieval_tables(gathered)
    for name, table in found_documents.items():
        alone = len(found_documents) == 1 and not tables
        tables["table" if alone else f"table-{name.replace('/', '-')}"] = table
    found = findings.found_by_length(gathered.rows)
    if found:
        depths = {one["depth"] for row in gathered.rows for one in row.get("passkey", []) if "error" not in one}
        title = f"Pass keys found, %, the mean of {len(depths)} depths"
        tables["passkey"] = LengthTable(title, found, gathered.trained_at, digits=1, lower_is_better=False)
    if found and gathered.trained_at is not None:
        back = findings.found_by_distance(gathered.rows, gathered.trained_at)
        title = "Pass keys found, %, by how far back they stood: up to so many tokens, and more than half as many"
        if back:
            texts = findings.texts_by_distance(gathered.rows, gathered.trained_at)
            note = f"Of {', '.join(map(str, texts.values()))} texts."
            tables["passkey-back"] = LengthTable(
                title, back, gathered.trained_at, digits=1, lower_is_better=False, note=note
            )
    return tables


def figures(gathered: Gathered) -> list[Figure]:
    """All that can be drawn of what is stored; curves of the first seed only."""
    told = []
    values = findings.by_variant(gathered.rows)
    if values:
        caption = f"Perplexity against length, up to {WORST:g} times the lowest; the legend tells how far others go"
        if any(len(seeds) > 1 for row in values.values() for seeds in row.values()):
            caption += "; bands are deviations over seeds"
        told.append(Figure("perplexity", caption, perplexity_figure, (values, gathered.trained_at)))
    first: dict[str, dict[str, Any]] = {}
    for row in findings.with_again(gathered.rows):
        first.setdefault(row["variant"], row)
    rows = list(first.values())
    places = {row["variant"]: _longest(row) for row in rows if _longest(row)}
    if places:
        caption = "Loss by place in the longest text that each was read on, the first seed's"
        told.append(Figure("places", caption, place_figure, (places, gathered.trained_at)))
    trained = {row["cell"]: row for row in reversed(rows)}
    curves = {name: row["training"]["curve"] for name, row in reversed(trained.items()) if row["training"].get("curve")}
    if curves:
        told.append(Figure("loss", f"Loss in training, the first seed's{_averages(curves)}", loss_figure, (curves,)))
    tuned = {row["cell"]: row["fine_tuning"]["curve"] for row in rows if "fine_tuning" in row}
    if tuned:
        labels = ("contrastive loss", "queries seen in fine-tuning")
        told.append(Figure("contrastive", f"Loss in fine-tuning{_averages(tuned)}", loss_figure, (tuned,), labels))
    found = {
        row["variant"]: row["passkey"] for row in rows if any("error" not in one for one in row.get("passkey", []))
    }
    if found:
        told.append(Figure("passkey", "Pass keys found, by length and depth", passkey_figure, (found,)))
    return told


def _averages(curves: Curves) -> str:
    return "; each point is a mean of several" if any(len(curve) > MOST_POINTS for curve in curves.values()) else ""


def _longest(row: dict[str, Any]) -> list[tuple[int, float]]:
    read = [result for result in row["results"] if "by_place" in result]
    return max(read, key=lambda result: result["length"])["by_place"] if read else []


def retrieval_tables(gathered: Gathered) -> dict[str, LengthTable]:
    """nDCG@10 for each collection that was searched, BM25 below."""
    rows = [row for row in gathered.rows if "retrieval" in row]
    collections = list(dict.fromkeys(name for row in rows for name in row["retrieval"]))
    tables = {}
    for name in collections:
        values = findings.found_documents(rows, name)
        if name in gathered.words:
            lengths = {length for row in values.values() for length in row}
            values[WORDS] = {n: [100 * gathered.words[name]["ndcg@10"]] for n in sorted(lengths)}
        alone = len(collections) == 1
        title, paper = (gathered.title, gathered.paper) if alone else (f"{gathered.title}: {name}", {})
        tables[name] = LengthTable(title, values, gathered.trained_at, paper, lower_is_better=False, beside=(WORDS,))
    return tables


def failures(folder: Path) -> dict[str, str]:
    """Why each cell of a study that failed did."""
    found = sorted(folder.glob(f"*/{FAILURE}"))
    return {path.parent.name: path.read_text(encoding="utf-8").strip().splitlines()[-1] for path in found}


def _is_run(folder: Path) -> bool:
    return (folder / EVALUATION).is_file() or (
        (folder / "metrics.jsonl").is_file() and (folder / "recipe.toml").is_file()
    )


def _row(folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = read_json(folder / EVALUATION) if (folder / EVALUATION).is_file() else {}
    if "cell" in row:
        return row
    settings = {"recipe": asdict(recipes.load(str(folder / "recipe.toml")))}
    known = read_json(folder / "environment.json") if (folder / "environment.json").is_file() else {}
    return {
        "cell": folder.resolve().name,
        "variant": folder.resolve().name,
        "settings": settings,
        "training": training_record(folder),
        "seed": settings["recipe"]["train"]["seed"],
        "results": row.get("perplexity", []),  # cable eval may have read it
        **{key: known[key] for key in ENVIRONMENT if key in known},
    }


def loss_curves(folders: Sequence[Path]) -> Curves:
    """Tokens and training losses of every run that is one of the folders or in one, each run once."""
    runs = {run.resolve(): _row(run)["training"].get("curve") for folder in folders for run in _runs(folder)}
    return _told_apart({run: curve for run, curve in runs.items() if curve})


def is_fine_tuned(folder: Path) -> bool:
    """Whether ``cable retrieve train`` made it."""
    return (folder / "fine_tuning.json").is_file()


def fine_tuning_curves(folders: Sequence[Path]) -> Curves:
    """Updates and losses of encoders that ``cable retrieve train`` made."""
    logs = {folder.resolve(): read_json(folder / "fine_tuning.json")["log"] for folder in folders}
    return _told_apart({folder: [(entry["step"], entry["loss"]) for entry in log] for folder, log in logs.items()})


def _told_apart(curves: Mapping[Path, list[tuple[int, float]]]) -> Curves:
    """Each named by as many last parts of its path as tell it from the others."""
    for parts in range(1, max((len(path.parts) for path in curves), default=0) + 1):
        named = {"/".join(path.parts[-parts:]): curve for path, curve in curves.items()}
        if len(named) == len(curves):
            return named
    return {}


def write(folder: Path, gathered: Gathered, out: Path | None = None) -> Path:
    """The page, beside the runs unless ``out`` says otherwise."""
    path = out or folder / FILE
    write_atomically(path, render(gathered))
    return path


def render(gathered: Gathered) -> str:
    parts = [
        f"<h1>{escape(gathered.title)}</h1>",
        *_results(gathered),
        *_figures(gathered),
        "<h2>Training</h2>",
        _training(gathered.rows),
        *_failures(gathered.failures),
        "<h2>Settings</h2>",
        *_settings(gathered.rows),
        "<h2>Environment</h2>",
        _environment(gathered.rows),
    ]
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">'
    )
    return f"{head}<title>{escape(gathered.title)}</title><style>{STYLE}</style></head><body>\n" + "\n".join(
        [*parts, "</body></html>\n"]
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{body}</table></div>'


def _results(gathered: Gathered) -> list[str]:
    parts = [part for found in length_tables(gathered).values() for part in _length_table(found)]
    tasks = [
        [escape(row["cell"]), escape(task), escape(metric), f"{value:.4f}"]
        for row in gathered.rows
        for task, metrics in row.get("tasks", {}).items()
        for metric, value in metrics.items()
    ]
    if tasks:
        parts += ["<h2>Tasks</h2>", table(("cell", "task", "metric", "value"), tasks)]
    return parts


def _length_table(found: LengthTable) -> list[str]:
    rows = []
    for name in found.values:
        cells = [(escape(found.text(name, length)), found.is_best(name, length)) for length in found.lengths]
        rows.append([escape(name), *(f"<b>{cell}</b>" if best else cell for cell, best in cells)])
    note = f'<p class="note">{escape(found.caption)}</p>'
    return [f"<h2>{escape(found.title)}</h2>", table(("tokens read at once", *found.header()), rows), note]


def _figures(gathered: Gathered) -> list[str]:
    """Drawn anew from the numbers, inside the page."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return [_figure(figure.draw(Path(folder) / "one.svg")[0], figure.caption) for figure in figures(gathered)]
        except ImportError:
            return ["<p>No figures: matplotlib is missing. pip install 'cable-attn[plot]'</p>"]


def _figure(svg: Path, caption: str) -> str:
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.read_bytes()).decode()}"
    return f'<figure><img src="{source}" alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'


TRAINING = {
    "loss": ("loss", "{:.4f}"),
    "eval_loss": ("held-out loss", "{:.4f}"),
    "tokens": ("tokens", "{:,}"),
    "median_tokens_per_second": ("tokens/s", "{:,.0f}"),
    "train_runtime": ("trained in s", "{:,.0f}"),
    "peak_memory_mib": ("peak MiB", "{:,.0f}"),
}
"""Key of a training record → column and form."""


def _training(rows: list[dict[str, Any]]) -> str:
    known = [key for key in TRAINING if any(row["training"].get(key) is not None for row in rows)]
    lines = [
        [escape(row["cell"])] + [told(row["training"].get(key), TRAINING[key][1]) for key in known] for row in rows
    ]
    return table(("run", *(TRAINING[key][0] for key in known)), lines)


def told(value: Any, form: str) -> str:
    return "–" if value is None else form.format(value)


def _failures(failures: dict[str, str]) -> list[str]:
    if not failures:
        return []
    rows = [[escape(name), escape(reason)] for name, reason in failures.items()]
    return ["<h2>Failed</h2>", table(("cell", "why"), rows)]


def _flat(tree: Any, path: str = "") -> dict[str, str]:
    if not isinstance(tree, dict) or not tree:
        return {path: str(tree) if tree != "" else '""'}
    return {k: v for key, value in tree.items() for k, v in _flat(value, f"{path}.{key}" if path else str(key)).items()}


def _settings(rows: list[dict[str, Any]]) -> list[str]:
    """What differs between the runs by run, and what all share once."""
    flat = {row["cell"]: _flat(row["settings"]) for row in rows}
    keys = list(dict.fromkeys(key for settings in flat.values() for key in settings))
    shared = [key for key in keys if len({settings.get(key, "–") for settings in flat.values()}) == 1]
    differ = [key for key in keys if key not in shared]
    parts = []
    if differ:
        lines = [[_code(key), *(_code(settings.get(key, "–")) for settings in flat.values())] for key in differ]
        parts.append(table(("what differs", *flat), lines))
    first = next(iter(flat.values()))
    return [*parts, table(("setting of every run", "value"), [[_code(key), _code(first[key])] for key in shared])]


def _environment(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row.get("versions", {}).items())
        data = row.get("data", {})
        cells = (row.get("commit"), row.get("gpu") or "CPU", row.get("python"), versions)
        digests = (row.get("checkpoint_sha256"), data.get("sha256") if isinstance(data, dict) else data)
        told = [escape(str(cell or "–")) for cell in cells] + [_code(str(digest or "–")[:16]) for digest in digests]
        lines.append([escape(row["cell"]), *told])
    return table(("run", "commit", "GPU", "Python", "versions", "checkpoint", "text read"), lines)


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
