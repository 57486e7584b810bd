"""What a study's cells do: train, read, and store what was found.

A cell lives in a folder of its own, ``OUT/VARIANT-SEED``: a run folder of ``cable train``, while it is read
``reading.json`` with the lengths that are done, and at the end ``evaluation.json``. So a study can be cut off anywhere
and goes on with the same command, cells can be added, and one that fails does not stop the others.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from cable_attn import harness, passkey, pretraining
from cable_attn.data.corpus import embedded_corpus
from cable_attn.data.shards import MANIFEST, TOKENIZER, Tokens
from cable_attn.data.tokenizers import load_tokenizer
from cable_attn.devices import best_device
from cable_attn.environment import environment
from cable_attn.errors import CableError
from cable_attn.evaluation import (
    HeldOut,
    checkpoint_hash,
    evaluate,
    find_held_out,
    require_known_tokens,
    require_own_tokens,
    share_of,
)
from cable_attn.files import InUse, alone, as_json, read_json, writable_folder, write_json
from cable_attn.models.loading import load_model, tokenizer_of
from cable_attn.recipe import Recipe
from cable_attn.retrieval import cell as retrieval_cell
from cable_attn.retrieval.cell import Retrieval
from cable_attn.retrieval.collection import find_collection
from cable_attn.study import Cell, Reading, Study, choose
from cable_attn.training import Stopped, last_complete_checkpoint, read_metrics

EVALUATION = "evaluation.json"
READING = "reading.json"
FAILURE = "failure.txt"
BASELINE = "bm25.json"
CURVE_POINTS = 200

Watcher = Callable[[str, str, float], None]
"""``watch(cell, what, share)``: what a cell is doing, and how much of it is done."""


def run(
    study: Study,
    out: Path,
    *,
    only: Sequence[str] = (),
    watch: Watcher | None = None,
) -> dict[str, str]:
    """Train and read what is not done yet, one cell after the other; why each cell that failed did."""
    writable_folder(out)
    chosen = choose(study, only)
    _require_same_data(study, out)
    failed = {}
    for cell in chosen:
        try:
            run_cell(cell, out, watch)
        except Stopped:
            raise
        except InUse:
            _tell(watch, cell, "another process works on it", 0.0)
        except Exception as error:  # whatever it is, the other cells can still be done
            is_ours = isinstance(error, CableError)
            failed[cell.name] = str(error) if is_ours else f"{type(error).__name__}: {error}"
            (out / cell.name).mkdir(exist_ok=True)
            told = failed[cell.name] if is_ours else traceback.format_exc().strip()
            (out / cell.name / FAILURE).write_text(told + "\n", encoding="utf-8")
            _tell(watch, cell, "failed", 0.0)
        _release()
    return failed


def _require_same_data(study: Study, out: Path) -> None:
    """Results of other settings or data must not come up hours later, when the table is made, or never."""
    collections: dict[str, str] = {}
    for cell in study.cells():
        result, folder = stored_result(cell, out) or {}, cell.folder(out)
        trained_on = Path(cell.recipe().data.path)
        if _has_changed(trained_on, "train", result.get("training", {}).get("data")):
            raise CableError(
                f"{str(trained_on)!r} has changed since {cell.name} was trained. Choose another folder with --out, or "
                f"delete {str(folder)!r}."
            )
        read = Path(study.reading.path) if study.reading.path else trained_on
        changed = [str(read)] if _has_changed(read, study.reading.split, result.get("data", {}).get("sha256")) else []
        for name, found in result.get("retrieval", {}).items():
            if Path(name).is_dir():
                collections[name] = collections.get(name) or find_collection(name).sha256
                changed += [name] if collections[name] != found["sha256"] else []
        if changed:
            raise CableError(
                f"{changed[0]!r} has changed since {cell.name} was read. Choose another folder with --out, or delete "
                f"{str(folder / EVALUATION)!r}: the model is then read again."
            )


def _has_changed(shards: Path, split: str, before: str | None) -> bool:
    """Where both are known."""
    return before is not None and (shards / MANIFEST).is_file() and Tokens(shards, split).manifest_hash != before


def _release() -> None:
    """Nothing of a cell stays for the next one."""
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def command(study_file: str, out: Path, cell: Cell, overrides: Sequence[str], launcher: Sequence[str]) -> list[str]:
    """What runs one cell alone: here, through SLURM, or on another machine."""
    own = [sys.executable, "-m", "cable_attn", "study", "run", study_file, *overrides]
    return [*launcher, *own, "--out", str(out), "--only", cell.name]


def run_cell(cell: Cell, out: Path, watch: Watcher | None = None) -> dict[str, Any]:
    """One cell, from nothing, from where it was cut off, or already done."""
    result = stored_result(cell, out)
    if result is None:
        if cell.owner is not None:
            raise CableError(
                f"{cell.name} is {cell.owner}, whose results are not in {str(cell.folder(out))!r}. Run that study "
                "first, or leave the cell out with --only."
            )
        folder = out / cell.name
        folder.mkdir(exist_ok=True)
        with alone(folder, "cell"):
            result = stored_result(cell, out)  # by now by another process
            if result is None:
                check_reading(cell)
                result = _read(cell, _trained(cell, out, watch), folder, watch)
                write_json(folder / EVALUATION, result)
                (folder / READING).unlink(missing_ok=True)
                shutil.rmtree(folder / retrieval_cell.EMBEDDINGS, ignore_errors=True)
    (out / cell.name / FAILURE).unlink(missing_ok=True)
    _tell(watch, cell, "done", 1.0)
    return result


def check_reading(cell: Cell) -> None:
    """What reading will need, before hours of training."""
    reading, lengths = cell.study.reading, cell.study.lengths
    if cell.study.retrieval is not None:
        retrieval_cell.check(cell.study.retrieval)
        return
    path = reading.path or cell.recipe().data.path
    if reading.tasks:
        harness.require_tasks(reading.tasks, Path(reading.task_folder) if reading.task_folder else None)
    if not lengths:
        return
    is_embedded = path == "embedded"
    if is_embedded:
        tokens, starts = len(embedded_corpus("test")[0].text.encode()), [0]  # at most so many
    else:
        shards = Tokens(Path(path), reading.split)
        tokens, starts = len(shards), list(shards.document_starts)
    if reading.beginnings:
        _check_beginnings(reading.beginnings, lengths)
        tokens = reading.beginnings * sum(b - a >= reading.beginnings for a, b in pairwise([*starts, tokens])) + 1
    unit = reading.beginnings or 1  # only whole beginnings are read
    available = min(tokens, reading.tokens // unit * unit + 1) if reading.tokens else tokens
    needed = math.lcm(*lengths) if reading.same_tokens else max(lengths)
    if available <= needed:
        what = f"lengths that predict the same tokens need {needed}" if reading.same_tokens else f"{needed} needs"
        raise CableError(f"{path!r}, {reading.split}, gives {available} tokens; {what} more.")
    if is_embedded:
        return
    trained = Path(cell.recipe().data.path) / TOKENIZER
    if trained.is_dir():
        require_own_tokens(load_tokenizer(str(trained)), Path(path), str(trained))
    if reading.passkey and not trained.is_dir():
        raise CableError(f"reading.passkey needs a tokenizer with the tokens in {cell.recipe().data.path!r}.")


def _check_beginnings(beginnings: int, lengths: list[int]) -> None:
    wrong = [length for length in lengths if beginnings % length]
    if wrong:
        raise CableError(
            f"reading.beginnings={beginnings} must be a multiple of every length, and is none of {wrong[0]}: "
            "a window would hold two documents."
        )


def _trained(cell: Cell, out: Path, watch: Watcher | None) -> Path:
    """The folder of the cell's trained model."""
    owner = cell.study.trained_by
    folder = out.parent / owner / cell.name if owner else out / cell.name
    if not (folder / "config.json").exists():
        if owner:
            raise CableError(f"{str(folder)!r} holds no trained model. Run the study {owner!r} first.")
        _train(cell, folder, watch)
    elif changed := pretraining.changes(folder / "recipe.toml", cell.recipe()):
        raise CableError(f"{str(folder)!r} holds a model of another recipe: {'; '.join(changed)}.")
    return folder


def stored_result(cell: Cell, out: Path) -> dict[str, Any] | None:
    """What an earlier call has found; results of other settings are an error."""
    path = cell.folder(out) / EVALUATION
    if not path.exists():
        return None
    result: dict[str, Any] = read_json(path)
    if "settings" not in result:
        raise CableError(f"{str(path)!r} holds no results of a cell. Delete it to read the model again.")
    before = _complete(result["settings"])
    if before != as_json(cell.settings()):
        changed = _difference(before, cell.settings())
        raise CableError(
            f"{str(path)!r} holds results of other settings ({changed}). Give the same overrides, choose another "
            "folder with --out, or delete that file: a model of the same recipe is then read again."
        )
    return result if cell.owner is None else {**result, "cell": cell.name, "variant": cell.variant}


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of settings that did not exist yet when these were stored."""
    defaults = {"recipe": asdict(Recipe()), "reading": asdict(Reading()), "retrieval": asdict(Retrieval())}
    known = {key: value for key, value in defaults.items() if key in settings}
    return _merged(as_json(known), settings)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(below[key], above[key]) for key in below if isinstance(above.get(key), dict)}
    return {**below, **above, **both}


def _difference(before: Any, now: Any, path: str = "") -> str:
    """The first key that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**now, **before}:
            if before.get(key) != as_json(now.get(key)):
                return _difference(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    return f"{path} was {before!r} and is {now!r}"


def _tell(watch: Watcher | None, cell: Cell, what: str, share: float) -> None:
    if watch is not None:
        watch(cell.name, what, share)


def _train(cell: Cell, folder: Path, watch: Watcher | None) -> None:
    recipe = cell.recipe()
    loss = float("nan")

    def on_step(step: int, new: float | None) -> None:
        nonlocal loss
        loss = loss if new is None else new
        _tell(watch, cell, "training" if loss != loss else f"training, loss {loss:.2f}", step / recipe.train.steps)

    _tell(watch, cell, "training", 0.0)
    begun = last_complete_checkpoint(folder / "checkpoints") is not None
    pretraining.run(recipe, folder, resume=begun, watch=on_step)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def _read(cell: Cell, folder: Path, own: Path, watch: Watcher | None) -> dict[str, Any]:
    """``folder``: the trained model's; ``own``: the cell's."""
    study, recipe = cell.study, cell.recipe()
    result: dict[str, Any] = {
        "cell": cell.name,
        "variant": cell.variant,
        "seed": cell.seed,
        "settings": cell.settings(),
        "checkpoint_sha256": checkpoint_hash(folder),
        **pretraining.origin(recipe),
        "training": {**training_record(folder), **_data_of(folder)},
        **environment(),
    }
    if study.retrieval is not None:

        def on_share(what: str, share: float) -> None:
            _tell(watch, cell, what, share)

        result |= retrieval_cell.run(folder, own, study.retrieval, study.lengths, cell.seed, on_share)
    if recipe.model.family == "bert":  # otherwise the loss of its training is all there is to read
        return {**result, "results": []}
    reading, tokenizer = study.reading, tokenizer_of(folder)
    path = reading.path or recipe.data.path
    if tokenizer is not None:
        require_own_tokens(tokenizer, Path(path), str(folder))
    text = find_held_out(path, reading.split, reading.tokens, tokenizer, reading.beginnings)
    result["data"] = {"source": text.source, "sha256": text.sha256}
    kept = _Kept(own / READING, {key: result[key] for key in ("settings", "checkpoint_sha256", "data")})
    result |= _read_model(cell, folder, "", {}, text, kept, watch)
    if cell.again:
        result["again"] = {
            name: _read_model(cell, folder, name, changes, text, kept, watch) for name, changes in cell.again.items()
        }
    return result


class _Kept:
    """The lengths that were done when a reading was cut off, if it was of the same model and text."""

    def __init__(self, path: Path, of: dict[str, Any]):
        self.path, self.of = path, as_json(of)
        found = read_json(path) if path.exists() else {}
        self.rows: dict[str, list[dict[str, Any]]] = found["rows"] if found.get("of") == self.of else {}

    def keep(self, name: str, rows: list[dict[str, Any]]) -> None:
        self.rows[name] = rows
        write_json(self.path, {"of": self.of, "rows": self.rows})


def _read_model(
    cell: Cell,
    folder: Path,
    name: str,
    changes: dict[str, Any],
    text: HeldOut,
    kept: _Kept,
    watch: Watcher | None,
) -> dict[str, Any]:
    """``name`` and ``changes``: of a reading with another config, of which the model's weights know nothing."""
    study, reading = cell.study, cell.study.reading
    model = load_model(folder, **changes).to(best_device())
    require_known_tokens(text.tokens, model, text.source)

    def told_as(what: str, total: int) -> Callable[[int, int], None]:
        return share_of(total, lambda length, share: _tell(watch, cell, what.format(length), share))

    on_tokens = told_as("reading {} tokens at once", len(text.tokens) * len(study.lengths))
    options: dict[str, Any] = {"stride": reading.stride or None, "same_tokens": reading.same_tokens}
    options |= {"known": kept.rows.get(name, ()), "keep": partial(kept.keep, name)}
    rows = evaluate(model, text, study.lengths, batch_tokens=reading.batch_tokens, watch=on_tokens, **options)
    if rows and all("error" in row for row in rows):
        raise CableError(f"{cell.name} cannot be read at any length: {rows[0]['error']}")
    _require_memory(cell, rows)
    result: dict[str, Any] = {"results": rows}
    if reading.passkey:
        task = passkey.Task(text.tokenizer)
        total = sum(study.lengths) * len(passkey.DEPTHS) * reading.passkey
        on_tokens = told_as("looking for pass keys in {} tokens", total)
        own = f"pass keys {name}"
        options = {"known": kept.rows.get(own, ()), "keep": partial(kept.keep, own), "watch": on_tokens}
        lengths, depths = study.lengths, passkey.DEPTHS
        result["passkey"] = passkey.measure(model, task, text.tokens, lengths, depths, reading.passkey, **options)
        _require_memory(cell, result["passkey"])
    if reading.tasks and not changes:
        files = Path(reading.task_folder) if reading.task_folder else None
        _tell(watch, cell, "answering tasks", 1.0)
        result["tasks"] = harness.run_tasks(model, text.tokenizer, reading.tasks, files)
    return result


def _require_memory(cell: Cell, rows: list[dict[str, Any]]) -> None:
    """What did not fit may fit another time, or in smaller batches: it is no result."""
    lacking = [row["length"] for row in rows if row.get("out_of_memory")]
    if lacking:
        raise CableError(
            f"{cell.name}: {lacking[0]} tokens at once did not fit into memory. The other lengths are kept: free some "
            "memory, or lower reading.batch_tokens, and run it again."
        )


def _data_of(folder: Path) -> dict[str, Any]:
    """The hash of what a run was trained on."""
    path = folder / pretraining.ENVIRONMENT
    return {key: value for key, value in read_json(path).items() if key == "data"} if path.is_file() else {}


def training_record(folder: Path) -> dict[str, Any]:
    """The losses and the speed of the run."""
    lines = read_metrics(folder / "metrics.jsonl")
    wanted = ("loss", "eval_loss", "peak_memory_mib", "tokens", "seconds")
    last = {key: value for line in lines for key, value in line.items() if key in wanted}
    if "seconds" in last:
        last["train_runtime"] = last.pop("seconds")
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    if speeds:  # those of the second half: compiled and warm
        last["median_tokens_per_second"] = statistics.median(speeds[len(speeds) // 2 :])
    curve = [(line["tokens"], line["loss"]) for line in lines if "loss" in line]
    return {**last, "curve": curve[:: max(len(curve) // CURVE_POINTS, 1)]}


def results(study: Study, out: Path) -> Iterator[dict[str, Any]]:
    """The stored results of the cells that are done; those of other settings are an error."""
    for cell in study.cells():
        result = stored_result(cell, out)
        if result is not None:
            yield result


def add_baseline(study: Study, out: Path) -> None:
    """BM25 on the study's collections, once."""
    assert study.retrieval is not None
    known = baseline(out)
    wanted = study.retrieval.collections
    write_json(out / BASELINE, {name: retrieval_cell.baseline(name, known.get(name)) for name in wanted})


def baseline(out: Path) -> dict[str, dict[str, Any]]:
    return read_json(out / BASELINE) if (out / BASELINE).exists() else {}
