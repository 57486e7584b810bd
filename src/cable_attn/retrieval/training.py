"""Fine-tuning an encoder on queries and passages: sentence-transformers' losses on Hugging Face's Trainer.

Every other passage of a batch is a negative, and so are the hard ones that come with a query; no passage that answers
one query is a negative of another. The trainer of sentence-transformers would do much the same, but insists on the
package ``datasets``; this one takes lists.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler
from transformers import TrainingArguments, set_seed

from cable_attn.devices import has_bf16
from cable_attn.environment import environment
from cable_attn.errors import CableError, reason
from cable_attn.files import alone, read_json, read_jsonl, writable_folder, write_json
from cable_attn.retrieval.encoder import encoder_hash, load_encoder
from cable_attn.training import (
    DecayingTrainer,
    Stopped,
    Stopping,
    Watcher,
    Watching,
    last_complete_checkpoint,
    processes,
    remove_cut_off,
    stop_when_asked,
)

MSMARCO = ("sentence-transformers/msmarco-co-condenser-margin-mse-sym-mnrl-mean-v1", "triplet-hard")
"""MS-MARCO with mined hard negatives, on the hub."""
SETTINGS = "settings.json"
ORDERS = 20
"""In how many a batch is looked for until there is none."""
WORKERS = 4
"""Processes that turn texts into tokens while the GPU is at work."""
KEYS = {"query": ("query", "anchor", "question"), "positive": ("positive", "pos"), "negative": ("negative", "neg")}


@dataclass(frozen=True)
class Settings:
    """The paper's, and our own where it is silent."""

    batch_size: int = 128
    learning_rate: float = 8e-5
    warmup: float = 0.05
    epochs: float = 1.0
    max_length: int = 512
    negatives: int = 1
    """Hard negatives of each query, if it has so many."""
    cached_batch: int = 0
    """Above 0: compute the loss from parts of so many texts, so that any batch fits (GradCache)."""
    seed: int = 0
    save_every: int = 500

    def __post_init__(self) -> None:
        for key in ("batch_size", "learning_rate", "epochs", "max_length"):
            if not getattr(self, key) > 0:
                raise CableError(f"{key} must be above 0, got {getattr(self, key)}.")

    def steps(self, triplets: int) -> int:
        return max(round(triplets * self.epochs / self.batch_size), 1)


@dataclass(frozen=True)
class Triplet:
    query: str
    positive: str
    negatives: tuple[str, ...] = ()


def read_triplets(name: str, limit: int | None = None) -> list[Triplet]:
    """``msmarco`` from the hub, or a JSONL file: query, positive and negatives under their usual names."""
    if name == "msmarco":
        return _msmarco(limit)
    found = []
    path = Path(name)
    if not path.is_file():
        raise CableError(f"{name!r} is no file. Give a JSONL file of triplets, or msmarco for those of the hub.")
    for number, row in read_jsonl(path):
        found += _triplets(path, number, row)
        if limit is not None and len(found) >= limit:
            break
    if not found:
        raise CableError(f"{name!r} has no triplet.")
    return found[:limit]


def _triplets(path: Path, number: int, row: dict[str, Any]) -> list[Triplet]:
    """One for each positive; a negative that is empty or answers the query is none."""
    texts = {}
    for part, names in KEYS.items():
        value: Any = next((row[key] for key in names if key in row), [])
        texts[part] = [value] if isinstance(value, str) else value
        if not isinstance(texts[part], list) or not all(isinstance(text, str) for text in texts[part]):
            raise CableError(f"{path}, line {number}: {part} must be a text or a list of texts.")
    texts = {part: [text for text in own if text.strip()] for part, own in texts.items()}
    if len(texts["query"]) != 1 or not texts["positive"]:
        raise CableError(f"{path}, line {number}: wanted a query and a positive text ({', '.join(row) or 'nothing'}).")
    negatives = tuple(text for text in texts["negative"] if text not in texts["positive"])
    return [Triplet(texts["query"][0], positive, negatives) for positive in texts["positive"]]


def _msmarco(limit: int | None) -> list[Triplet]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CableError("msmarco needs the package datasets: pip install 'cable-attn[data]'.") from error
    try:
        rows = load_dataset(*MSMARCO, split="train")
    except Exception as error:  # whatever the hub or the network did
        raise CableError(
            f"the hub cannot give {MSMARCO[0]!r}: {reason(error)}. Fetch it where there is a "
            "network, or give a JSONL file of triplets."
        ) from error
    chosen = rows.select(range(min(limit or len(rows), len(rows))))
    return [Triplet(row["query"], row["positive"], (row["negative"],)) for row in chosen]


class _Triplets(Dataset):
    def __init__(self, triplets: list[Triplet]):
        self.triplets = triplets

    def __len__(self) -> int:
        return len(self.triplets)

    def __getitem__(self, index: int) -> Triplet:
        return self.triplets[index]


class NoRepeats(Sampler[int]):
    """A shuffled epoch in whose batches no passage that answers one query is a negative of another.

    When what is left no longer fills a batch, another order of all of them goes on.
    """

    def __init__(self, triplets: list[Triplet], batch_size: int, negatives: int, seed: int):
        self.triplets, self.batch_size, self.negatives, self.seed = triplets, batch_size, negatives, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.triplets)

    def __iter__(self) -> Iterator[int]:
        given, orders, failed = 0, itertools.count(), list[int]()
        left = self._order(next(orders))
        while given < len(self):
            size = min(self.batch_size, len(self) - given)
            all_left = len(left) == len(self)
            batch, skipped = self._batch(left, size)
            if len(batch) == size:
                yield from batch
                given, failed = given + size, []
                left.extendleft(reversed(skipped))
                continue
            failed += [len(batch)] if all_left else []  # in another order more may fit together
            if len(failed) == ORDERS:
                raise CableError(
                    f"no batch of {size} can be made without repeating a query or an answer: {max(failed)} of the "
                    f"{len(self)} triplets is what fits together. Choose a batch size of that or less."
                )
            left = self._order(next(orders))

    def _order(self, number: int) -> deque[int]:
        order = list(range(len(self.triplets)))
        random.Random(f"{self.seed} {self.epoch}" + (f" {number}" if number else "")).shuffle(order)
        return deque(order)

    def _batch(self, left: deque[int], size: int) -> tuple[list[int], list[int]]:
        batch: list[int] = []
        skipped: list[int] = []
        queries: set[str] = set()
        answers: set[str] = set()
        others: set[str] = set()
        while left and len(batch) < size:
            index = left.popleft()
            triplet = self.triplets[index]
            negatives = set(triplet.negatives[: self.negatives])
            if triplet.query in queries or triplet.positive in answers | others or negatives & answers:
                skipped.append(index)
                continue
            batch.append(index)
            queries.add(triplet.query)
            answers.add(triplet.positive)
            others |= negatives
        return batch, skipped


class _Collate:
    """A batch of triplets as columns of tokens: queries, positives, first negatives, …

    A query that has too few hard negatives gets those of another one in the batch, which answer none of its queries.
    """

    def __init__(self, tokenizer: Any, settings: Settings, columns: int):
        self.tokenizer, self.settings, self.columns = tokenizer, settings, columns

    def __call__(self, batch: list[Triplet]) -> dict[str, Any]:
        texts = [[t.query for t in batch], [t.positive for t in batch]]
        for n in range(self.columns):
            known = [t.negatives[n] for t in batch if len(t.negatives) > n]
            rows = enumerate(batch) if known else ()
            texts.append([t.negatives[n] if len(t.negatives) > n else known[i % len(known)] for i, t in rows])
        options: dict[str, Any] = {"truncation": True, "max_length": self.settings.max_length, "padding": True}
        return {
            "features": [dict(self.tokenizer(column, return_tensors="pt", **options)) for column in texts if column]
        }


class _Trainer(DecayingTrainer):
    """The loss looks at all columns of a batch at once."""

    loss: Any
    negatives = 1

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        triplets: Any = train_dataset or self.train_dataset
        return NoRepeats(triplets.triplets, self.args.per_device_train_batch_size, self.negatives, self.args.seed)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.loss.model = model  # wrapped by now
        value = self.loss(inputs["features"], None)
        return (value, {}) if return_outputs else value

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model: Any = self.model
        model.save(output_dir or self.args.output_dir, create_model_card=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        loaded = load_encoder(resume_from_checkpoint)
        target: Any = self.model
        target.load_state_dict(loaded.state_dict())


def train(
    encoder: str,
    triplets: list[Triplet],
    folder: Path,
    settings: Settings,
    resume: bool = False,
    watch: Watcher | None = None,
) -> dict[str, float]:
    """Fine-tune; ``folder`` is then a SentenceTransformer that loads in plain sentence-transformers."""
    from sentence_transformers.sentence_transformer import losses

    checkpoints = folder / ".training"
    if (folder / "modules.json").exists() or ((folder / "config.json").exists() and not checkpoints.exists()):
        done = ", and no run to resume" if resume else ""
        raise CableError(f"{str(folder)!r} holds a model already{done}. Choose another folder with --out.")
    if checkpoints.exists() and not resume:
        raise CableError(f"{str(folder)!r} holds a run that was cut off. Add --resume, or choose another with --out.")
    if processes() > 1:
        raise CableError("fine-tuning runs in one process; batches of many processes would not see each other.")
    columns = min(max(len(t.negatives) for t in triplets), settings.negatives)
    next(iter(NoRepeats(triplets, settings.batch_size, columns, settings.seed)))
    set_seed(settings.seed)
    model = load_encoder(encoder)
    model.max_seq_length = settings.max_length
    with alone(writable_folder(folder), "fine-tuning"), stop_when_asked() as asked:
        writable_folder(checkpoints)
        _claim(checkpoints / SETTINGS, origin(encoder, triplets, settings))
        remove_cut_off(checkpoints)
        stop = Stopping(asked)
        trainer = _Trainer(
            model=model,
            args=_arguments(settings, len(triplets), checkpoints),
            train_dataset=_Triplets(triplets),
            data_collator=_Collate(model.tokenizer, settings, columns),
            callbacks=[stop, Watching(watch)],
        )
        trainer.negatives = columns
        if settings.cached_batch:
            trainer.loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=settings.cached_batch)
        else:
            trainer.loss = losses.MultipleNegativesRankingLoss(model)
        trainer.train(resume_from_checkpoint=last_complete_checkpoint(checkpoints) if resume else None)
        if stop.agreed:
            raise Stopped(f"stopped at step {trainer.state.global_step}, saved.", *asked[:1])
        return _finish(trainer, encoder, folder, checkpoints, settings, len(triplets))


def origin(encoder: str, triplets: list[Triplet], settings: Settings) -> dict[str, Any]:
    """All that a fine-tuned encoder depends on."""
    own = {key: value for key, value in asdict(settings).items() if key != "save_every"}
    digest = hashlib.sha256()
    for triplet in triplets:
        digest.update(json.dumps([triplet.query, triplet.positive, triplet.negatives]).encode())
    return {**own, "encoder_sha256": encoder_hash(encoder), "triplets_sha256": digest.hexdigest()}


def _claim(path: Path, wanted: dict[str, Any]) -> None:
    """A run that was cut off goes on with its own settings or not at all."""
    if path.exists():
        require_same(path.parent.parent, read_json(path), wanted)
    else:
        write_json(path, wanted)


def require_same(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"{key} was {before.get(key)!r} and is {value!r}" for key, value in now.items() if before.get(key) != value
    ]
    if changed:
        raise CableError(
            f"{str(folder)!r} holds the fine-tuning of other settings: {'; '.join(changed)}. Give the same ones, or "
            "delete it."
        )


def _finish(
    trainer: Any, encoder: str, folder: Path, checkpoints: Path, settings: Settings, count: int
) -> dict[str, float]:
    """The encoder, file by file; modules.json, the last, says that all is there."""
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    partial = checkpoints / "model"
    trainer.model.save(str(partial), create_model_card=False)
    known = {"encoder": encoder, "triplets": count, **asdict(settings), "log": log, **environment()}
    write_json(partial / "fine_tuning.json", {**known, "origin": read_json(checkpoints / SETTINGS)})
    for path in sorted(partial.iterdir(), key=lambda path: path.name == "modules.json"):
        if (folder / path.name).is_dir():  # of a move that was cut off
            shutil.rmtree(folder / path.name)
        shutil.move(str(path), folder / path.name)
    shutil.rmtree(checkpoints)
    return {"loss": log[-1]["loss"] if log else float("nan")}


def _arguments(settings: Settings, count: int, folder: Path) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    steps = settings.steps(count)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=round(steps * settings.warmup),
        lr_scheduler_type="linear",
        bf16=has_bf16(),
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        seed=settings.seed,
        logging_steps=max(steps // 100, 1),
        save_steps=settings.save_every,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=False,
        dataloader_num_workers=WORKERS if cuda else 0,
        dataloader_pin_memory=cuda,
        use_cpu=not cuda,
    )
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # transformers would make the batch larger than the settings say
    return arguments


def describe(triplets: list[Triplet]) -> str:
    hard = sum(bool(triplet.negatives) for triplet in triplets)
    return f"{len(triplets):,} queries, {hard:,} with hard negatives"
