"""Tasks of lm-evaluation-harness, such as HellaSwag and LAMBADA, on any causal language model.

The harness asks the questions and scores the answers. This file hands it the model and, where there is no network, the
questions from local files; it leaves the model, the tokenizer and the random numbers as they were.
"""

from __future__ import annotations

import bz2
import copy
import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cable_attn.data.corpus import read_text
from cable_attn.errors import CableError, reason
from cable_attn.files import read_jsonl

SENTENCE_END = re.compile(r"""[.!?]["')]*(?:\s+|$)""")
NOISY = ("lm_eval", "datasets", "transformers", "huggingface_hub")


@dataclass(frozen=True)
class LocalTask:
    """A task of the harness whose questions may come from a local file."""

    recipe: str
    """The harness's own YAML, which keeps prompt, scoring and preprocessing."""
    split: str
    files: tuple[str, ...]
    """Patterns of file names; the first that matches is read."""
    read: Callable[[Path], list[dict[str, Any]]]
    """The file as rows of the dataset that the recipe expects."""


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: list[str],
    folder: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
) -> dict[str, dict[str, float]]:
    """Task → metric → value, as the harness computes them, without few-shot examples unless the task has its own.

    tasks: names of tasks, groups or tags of the harness.
    folder: read ``hellaswag`` and ``lambada`` (scored as lambada_openai) from its files instead of the hub. The first
        is ``hellaswag_val_full.txt``, that as ``.bz2``, or ``hellaswag*.jsonl``; the second ``lambada_test.jsonl``.
    limit: only the first so many questions of each task.
    max_length: tokens read at once; what is longer loses its beginning. By default the length of training.
    """
    _check(model, tasks, limit=limit, batch_size=batch_size, max_length=max_length)
    require_harness()
    with TemporaryDirectory(prefix="cable-tasks-", ignore_cleanup_errors=True) as scratch, _quiet(), _borrowed(model):
        loaded = _load_tasks(tasks, folder, Path(scratch))
        wrapped = _language_model(model, tokenizer, batch_size, max_length)
        return _evaluate(wrapped, loaded, limit)


def require_tasks(tasks: list[str], folder: Path | None = None) -> None:
    """All that these tasks need is here, or can be fetched."""
    require_harness()
    with TemporaryDirectory(prefix="cable-tasks-", ignore_cleanup_errors=True) as scratch, _quiet():
        _load_tasks(tasks, folder, Path(scratch))


def _check(model: PreTrainedModel, tasks: list[str], **at_least_one: int | None) -> None:
    if not model.can_generate():
        raise CableError(f"tasks need a causal language model, got {type(model).__name__}.")
    if not tasks:
        raise CableError("no task is named. Give at least one, such as 'hellaswag'.")
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise CableError(f"{name} must be at least 1, got {value}.")


def require_harness() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise CableError("tasks need lm-evaluation-harness: pip install 'cable-attn[eval]'.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and of the logs only errors."""
    from tqdm import tqdm

    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    show = tqdm.__init__

    def hide(bar: Any, *args: Any, **kwargs: Any) -> None:
        show(bar, *args, **{**kwargs, "disable": True})

    tqdm.__init__ = hide  # the harness has no switch for its bars
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        tqdm.__init__ = show
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@contextmanager
def _borrowed(model: PreTrainedModel) -> Iterator[None]:
    """The harness's seeds, for tasks that shuffle; afterwards seeds and training mode are the caller's again."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    training, python_state, numpy_state = model.training, random.getstate(), np.random.get_state()
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        torch.manual_seed(DEFAULT_OTHER_SEED)
        try:
            yield
        finally:
            model.train(training)
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _language_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, max_length: int | None
) -> Any:
    """The model as the harness wants it."""
    from lm_eval.models.huggingface import HFLM

    class LanguageModel(HFLM):
        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
            longest = max((len(continuation) for _, _, continuation in requests), default=0)
            if longest > self.max_length:  # a bare assertion in the harness
                raise CableError(f"an answer has {longest} tokens, more than max_length={self.max_length}. Raise it.")
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

    return LanguageModel(
        pretrained=model,
        tokenizer=copy.deepcopy(tokenizer),  # the harness may give it a padding token
        backend="causal",
        batch_size=batch_size,
        max_length=max_length or getattr(model.config, "max_position_embeddings", None),
        softmax_dtype="float32",  # in bfloat16 many answers would tie
    )


def _evaluate(language_model: Any, loaded: dict[str, dict[str, Any]], limit: int | None) -> dict[str, dict[str, float]]:
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.evaluator import evaluate

    for task in loaded["tasks"].values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    outcome: Any = evaluate(lm=language_model, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False)
    rows = {name: _metrics(row) for name, row in outcome["results"].items()}
    return {name: metrics for name, metrics in rows.items() if metrics}


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """The harness's keys are ``metric,filter``; most tasks have the filter ``none``."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in row.items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    }


def _load_tasks(names: list[str], folder: Path | None, scratch: Path) -> dict[str, dict[str, Any]]:
    """Those of local files first: their errors come at once, while the harness takes a while to list its tasks."""
    local = [] if folder is None else [name for name in names if name in LOCAL_TASKS]
    others = [name for name in names if name not in local]
    loaded = []
    if folder is not None and local:
        manager = _local_tasks(local, folder, scratch)
        loaded += [manager.load(name) for name in local]
    if others:
        manager = _harness_tasks()
        loaded += [_load(manager, name) for name in others]
    return {
        kind: {name: found for part in loaded for name, found in part[kind].items()} for kind in ("tasks", "groups")
    }


def _load(manager: Any, name: str) -> Any:
    if name not in manager.task_index:
        raise _unknown_task(name, manager.all_tasks)
    try:
        return manager.load(name)
    except (OSError, ValueError) as error:  # the hub's errors are kinds of these
        raise _not_loaded(name, manager.task_index[name].cfg or {}, error) from error


def _unknown_task(name: str, known: list[str]) -> CableError:
    """There are thousands, so the message names the nearest only."""
    nearest = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return CableError(f"unknown task {name!r}.{hint} `lm-eval ls tasks` lists all {len(known)}.")


def _not_loaded(name: str, config: dict[str, Any], error: Exception) -> CableError:
    dataset = f"dataset {config['dataset_path']!r}" if "dataset_path" in config else "its datasets"
    return CableError(
        f"task {name!r} cannot be loaded: {reason(error)}. Fetch {dataset} into the Hugging Face cache while there is "
        f"a network; {' and '.join(LOCAL_TASKS)} can be read from local files instead, in a folder given as `folder`."
    )


@cache
def _harness_tasks() -> Any:
    """All tasks of the harness. It reads 14,000 YAML files to list them, a quarter of a minute, so once must do."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _local_tasks(names: list[str], folder: Path, scratch: Path) -> Any:
    from lm_eval.tasks import TaskManager

    for name in names:
        _write_local_task(name, folder, scratch)
    return TaskManager(include_path=str(scratch), include_defaults=False)


def _write_local_task(name: str, folder: Path, scratch: Path) -> None:
    """The questions as JSON lines, and a recipe that differs from the harness's in where they come from."""
    from lm_eval import tasks

    task = LOCAL_TASKS[name]
    questions, recipe = scratch / f"{name}.jsonl", scratch / f"{name}.yaml"
    rows = task.read(_find(folder, task.files, name))
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings: dict[str, Any] = {
        "include": str(Path(tasks.__file__).parent / task.recipe),
        "task": name,
        "tag": [],
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {task.split: str(questions)}, "cache_dir": str(scratch / "cache")},
        "training_split": None,
    }
    recipe.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML


def _find(folder: Path, patterns: tuple[str, ...], task: str) -> Path:
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            raise CableError(f"task {task!r} needs one file, {str(folder)!r} has {', '.join(p.name for p in found)}.")
        if found:
            return found[0]
    raise CableError(f"task {task!r} needs a file that folder {str(folder)!r} lacks: {' or '.join(patterns)}.")


def _read_hellaswag(path: Path) -> list[dict[str, Any]]:
    rows = _hellaswag_json(path) if path.suffix == ".jsonl" else _hellaswag_text(path)
    if not rows:
        raise CableError(f"{str(path)!r} is empty.")
    return rows


def _hellaswag_json(path: Path) -> list[dict[str, Any]]:
    """The official layout; some copies leave an empty ``ctx_b`` out and write the label as text."""
    rows = []
    for number, row in read_jsonl(path):
        where = f"{path}, line {number}"
        try:
            label, endings = int(row["label"]), [str(ending) for ending in row["endings"]]
            texts = {"activity_label": str(row["activity_label"]), "ctx_a": str(row["ctx_a"])}
        except (KeyError, TypeError, ValueError) as error:
            raise CableError(f"{where}: not an item of HellaSwag ({type(error).__name__}: {error}).") from error
        rows.append(_hellaswag_row(**texts, ctx_b=str(row.get("ctx_b", "")), endings=endings, label=label, where=where))
    return rows


def _hellaswag_text(path: Path) -> list[dict[str, Any]]:
    """Six lines an item: ``activity: context``, the index of the true ending, four endings."""
    lines = _text(path).rstrip("\n").split("\n")
    if len(lines) % 6:
        raise CableError(f"{str(path)!r} must have six lines for each item, but has {len(lines)} lines.")
    rows = []
    for start in range(0, len(lines), 6):
        where = f"{path}, line {start + 1}"
        heading, label, *endings = (line.strip() for line in lines[start : start + 6])
        activity, colon, context = heading.partition(": ")
        if not colon or not label.isdecimal():
            raise CableError(f"{where}: an item begins with 'activity: context' and the index of the true ending.")
        ctx_a, ctx_b = _split_context(context)
        rows.append(_hellaswag_row(activity, ctx_a, ctx_b, endings, int(label), where))
    return rows


def _split_context(context: str) -> tuple[str, str]:
    """Whole sentences, and the beginning of one more, which the harness capitalises; this layout has them joined."""
    ends = [found.end() for found in SENTENCE_END.finditer(context)]
    cut = ends[-1] if ends else len(context)
    return context[:cut].rstrip(), context[cut:]


def _hellaswag_row(
    activity_label: str, ctx_a: str, ctx_b: str, endings: list[str], label: int, where: str
) -> dict[str, Any]:
    if not 0 <= label < len(endings):
        raise CableError(f"{where}: the true ending is {label}, but there are {len(endings)} endings, from 0 on.")
    return {
        "activity_label": activity_label,
        "ctx_a": ctx_a,
        "ctx_b": ctx_b,
        "endings": endings,
        "label": str(label),
    }


def _read_lambada(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, row in read_jsonl(path):
        where = f"{path}, line {number}"
        if not isinstance(row.get("text"), str) or not row["text"].strip():
            raise CableError(f"{where}: no text in column 'text' (found: {', '.join(row)}).")
        rows.append({"text": row["text"]})
    if not rows:
        raise CableError(f"{str(path)!r} is empty.")
    return rows


def _text(path: Path) -> str:
    if path.suffix != ".bz2":
        return read_text(path)
    try:
        return bz2.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, ValueError) as error:
        raise CableError(f"cannot read {str(path)!r}: {error}.") from error


LOCAL_TASKS = {
    "hellaswag": LocalTask(
        recipe="hellaswag/hellaswag.yaml",
        split="validation",
        files=("hellaswag_val_full.txt", "hellaswag_val_full.txt.bz2", "hellaswag_val*.jsonl", "hellaswag*.jsonl"),
        read=_read_hellaswag,
    ),
    "lambada": LocalTask(
        recipe="lambada/lambada_openai.yaml", split="test", files=("lambada_test.jsonl",), read=_read_lambada
    ),
}
