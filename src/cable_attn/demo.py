"""The demo: train a small GPT with several encodings on short windows, and read 16 times further."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, set_seed

from cable_attn.data import Document, Windows, embedded_corpus, encode, hold_out, read_texts, train_bpe
from cable_attn.errors import CableError
from cable_attn.evaluation import comparable, perplexity
from cable_attn.files import new_folder, read_json, writable_folder, write_json
from cable_attn.models import CableGPTConfig, CableGPTForCausalLM
from cable_attn.models.loading import load_causal_lm
from cable_attn.training import TrainSettings, train

OPTIONS: dict[str, dict[str, Any]] = {"sinusoidal": {"scale_tokens": True}}
"""Where an encoding needs help to learn anything in so short a run."""

Results = dict[str, dict[int, float]]
"""encoding → length → perplexity."""


@dataclass(frozen=True)
class DemoSettings:
    """Small enough for five minutes on two cores, large enough that the difference is plain to see."""

    encodings: tuple[str, ...] = ("cable", "alibi", "rope", "sinusoidal", "nope")
    length: int = 128
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    steps: int = 600
    batch_size: int = 4
    learning_rate: float = 2e-3
    hidden_size: int = 128
    layers: int = 3
    heads: int = 4
    vocab_size: int = 2048
    eval_tokens: int = 32768
    seed: int = 0

    def __post_init__(self) -> None:
        for encoding in self.encodings:
            self.model_config(encoding)  # a bad name or number must not come up an hour later

    @property
    def lengths(self) -> list[int]:
        return [self.length * multiple for multiple in self.multiples]

    def model_config(self, encoding: str) -> CableGPTConfig:
        return CableGPTConfig.preset(
            "tiny",
            encoding=encoding,
            encoding_options=OPTIONS.get(encoding),
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=self.length,
            bos_token_id=0,
            eos_token_id=0,
        )


@dataclass(frozen=True)
class DemoData:
    tokenizer: PreTrainedTokenizerBase
    train: np.ndarray
    held_out: np.ndarray


Watcher = Callable[[str, str, float], None]
"""``watch(encoding, what, share)``: what is being done for an encoding, and how much of it is done."""


def run_demo(out: Path, settings: DemoSettings, text: Path | None = None, watch: Watcher | None = None) -> Results:
    """Train and evaluate every encoding; what an earlier call has finished is kept, what it began goes on.

    ``out`` receives ``results.json``, ``settings.json`` and a checkpoint folder for each encoding.
    """
    data = prepare_data(settings, text)
    writable_folder(out)
    _same_settings_as_before(out, settings, text)
    results: Results = {}
    for encoding in settings.encodings:
        tell = _for_one(watch, encoding)
        results[encoding] = _run_cell(out, encoding, settings, data, tell)
        write_json(out / "results.json", results)
    return results


def prepare_data(settings: DemoSettings, text: Path | None) -> DemoData:
    """The embedded corpus, or the user's text with its end held out."""
    if text is None:
        train_documents, held_out = embedded_corpus("train"), embedded_corpus("test")
    else:
        train_documents, held_out = hold_out(read_texts(text))
    tokenizer = train_bpe(train_documents, settings.vocab_size)
    return DemoData(
        tokenizer,
        _tokens(train_documents, tokenizer, settings.length),
        comparable(encode(held_out, tokenizer), settings.lengths, settings.eval_tokens),
    )


def _tokens(documents: list[Document], tokenizer: PreTrainedTokenizerBase, length: int) -> np.ndarray:
    tokens = encode(documents, tokenizer)
    Windows(tokens, length)  # says what is wrong if they do not fill one
    return tokens


def _same_settings_as_before(out: Path, settings: DemoSettings, text: Path | None) -> None:
    """Results of different settings never mix in one folder."""
    now: dict[str, Any] = {**asdict(settings), "text": None if text is None else str(text.resolve())}
    now.pop("encodings")  # adding an encoding to a run is fine
    path = out / "settings.json"
    if path.exists():
        before = read_json(path)
        differing = [key for key in now if before.get(key) != _as_json(now[key])]
        if differing:
            raise CableError(
                f"{str(out)!r} holds a run with other settings ({', '.join(differing)}). "
                "Add --fresh to replace it, or choose another folder with --out."
            )
    write_json(path, now)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _for_one(watch: Watcher | None, encoding: str) -> Callable[[str, float], None]:
    return lambda what, share: watch(encoding, what, share) if watch is not None else None


def _run_cell(
    out: Path, encoding: str, settings: DemoSettings, data: DemoData, tell: Callable[[str, float], None]
) -> dict[int, float]:
    """One encoding, from nothing, from where it was cut off, or already done."""
    folder, work = out / encoding, out / f".{encoding}.training"
    if not folder.exists():
        _train_cell(folder, work, encoding, settings, data, tell)
    shutil.rmtree(work, ignore_errors=True)
    stored = folder / "perplexity.json"
    if not stored.exists():
        write_json(stored, _evaluate_cell(folder, settings, data, tell))
    tell("done", 1.0)
    return {int(length): value for length, value in read_json(stored).items()}


def _train_cell(
    folder: Path,
    work: Path,
    encoding: str,
    settings: DemoSettings,
    data: DemoData,
    tell: Callable[[str, float], None],
) -> None:
    set_seed(settings.seed)
    model = CableGPTForCausalLM(settings.model_config(encoding))
    loss = float("nan")

    def on_step(step: int, new_loss: float | None) -> None:
        nonlocal loss
        loss = loss if new_loss is None else new_loss
        tell(f"training, loss {loss:.2f}" if step >= 10 else "training", step / settings.steps)

    recipe = TrainSettings(
        steps=settings.steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.steps // 20,
        seed=settings.seed,
    )
    log = train(model, Windows(data.train, settings.length), recipe, work, on_step)
    with new_folder(folder) as partial:
        model.save_pretrained(partial)
        data.tokenizer.save_pretrained(partial)
        write_json(partial / "training.json", log)


def _evaluate_cell(
    folder: Path, settings: DemoSettings, data: DemoData, tell: Callable[[str, float], None]
) -> dict[int, float]:
    model, _ = load_causal_lm(folder)
    total, done = len(data.held_out) * len(settings.lengths), 0
    measured = {}
    for length in settings.lengths:

        def on_tokens(count: int, length: int = length) -> None:
            nonlocal done
            done += count
            tell(f"reading {length} tokens at once", done / total)

        measured[length] = perplexity(model, data.held_out, length, on_tokens=on_tokens)
    return measured
