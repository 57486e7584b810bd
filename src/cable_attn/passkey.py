"""Passkey and needle: a fact somewhere in a long text, and at its end the question for it.

    … The pass key is 71432. Remember it. 71432 is the pass key. … What is the pass key? The pass key is

A small model must be taught the task at its training length (``cable train … passkey=0.1`` mixes it in). The test is
whether it still finds the fact in texts many times longer, and at which depth. The filler is real text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from cable_attn.errors import CableError
from cable_attn.evaluation import failure, output_head, precision, require_positions

COLOURS = ("red", "green", "blue", "white", "black", "yellow", "purple", "brown", "silver", "golden")
ANIMALS = ("horse", "dog", "cat", "bird", "fish", "lion", "bear", "sheep", "wolf", "eagle")
SITES = ("river", "garden", "church", "castle", "forest", "market", "harbour", "bridge", "school", "island")


@dataclass(frozen=True)
class Form:
    """fact and question, with the answer to fill in, and how an answer is drawn."""

    fact: str
    question: str
    answer: Callable[[np.random.Generator], str]


LEAST_FILLER = 1.5
"""In training each text is so many times as long as what it tells and asks, or longer."""
MOST_ASKED = 8
"""In training the same fact is asked for up to so many times."""
DEPTHS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

FORMS = {
    "passkey": Form(
        " The pass key is {}. Remember it. {} is the pass key. ",
        " What is the pass key? The pass key is",
        lambda draw: "".join(map(str, draw.integers(0, 10, 5))),
    ),
    "needle": Form(
        " The secret of this story is the {}. ",
        " The secret of this story is the",
        lambda draw: f"{draw.choice(COLOURS)} {draw.choice(ANIMALS)} in the {draw.choice(SITES)}",
    ),
}


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray
    answer: int
    """How many tokens at the end are the answer."""


class Task:
    """Makes samples of any length and depth."""

    def __init__(self, tokenizer: Any, form: str = "passkey"):
        if tokenizer is None:
            raise CableError(
                "passkey texts need the tokenizer of the data, and it has none. Prepare the data with a Hugging Face "
                "tokenizer, or import it with --tokenizer."
            )
        self.tokenizer, self.form = tokenizer, FORMS[form]

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def make(
        self, filler: np.ndarray, length: int, depth: float, draw: np.random.Generator, is_lesson: bool = False
    ) -> Sample:
        """A text of ``length`` tokens with the fact at ``depth``: 0 at the beginning, 1 just before the question.

        is_lesson: it may be asked for, and told, at places between too.
        """
        answer = self.form.answer(draw)
        fact, reply = self._encode(self.form.fact.format(answer, answer)), self._encode(f" {answer}")
        asked = np.concatenate([self._encode(self.form.question), reply])
        fits = int((length / LEAST_FILLER - len(fact)) / len(asked))
        times = 2 ** int(draw.integers(min(max(fits, 1), MOST_ASKED).bit_length())) if is_lesson else 1
        room = length - len(fact) - times * len(asked)
        if room < 0:
            raise CableError(f"a passkey text needs at least {length - room} tokens, got a length of {length}.")
        at = round(depth * room)
        before, *between = np.split(np.resize(filler, room), [at, *np.sort(draw.integers(at, room + 1, times - 1))])
        return Sample(np.concatenate([before, fact, *(part for one in between for part in (one, asked))]), len(reply))

    def teach(self, filler: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Texts of the task side by side, as long as the filler together: one, or 2, 4, … that are not all fact.

        One answer among hundreds of tokens is too little to learn from in a short run; so some are asked more often.
        """
        answer = self.form.answer(draw)
        told = self._encode(f"{self.form.fact.format(answer, answer)}{self.form.question} {answer}")
        doublings = max(int(len(filler) / (LEAST_FILLER * len(told))), 1).bit_length()
        parts = np.array_split(filler, 2 ** int(draw.integers(doublings)))
        return np.concatenate(
            [self.make(part, len(part), draw.random(), draw, is_lesson=True).tokens for part in parts]
        )


class Mixed(Dataset):
    """Windows of which a share is made into passkey texts, each from its own tokens; the same in every epoch."""

    def __init__(self, windows: Dataset, task: Task, share: float, seed: int):
        self.windows, self.task, self.share, self.seed = windows, task, share, seed

    def __len__(self) -> int:
        return len(self.windows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.windows[index]
        draw = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        if draw.random() >= self.share:
            return sample
        made = torch.from_numpy(self.task.teach(sample["input_ids"].numpy(), draw))
        return {**sample, "input_ids": made, "labels": made}


def measure(
    model: PreTrainedModel,
    task: Task,
    filler: np.ndarray,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 10,
    seed: int = 0,
    watch: Callable[[int, int], None] | None = None,
    known: Sequence[dict[str, Any]] = (),
    keep: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """For each length and depth the share of texts whose whole answer the model would write (greedily).

    A length that cannot be read gives a row that says why. ``keep(rows)`` hears of the rows so far after each length;
    ``known``: those that an earlier call has kept.
    """
    model.eval()
    head = output_head(model)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        if before := [row for row in known if row["length"] == length and "error" not in row]:
            rows += before
            continue
        try:
            require_positions(model, length)
            for depth in depths:
                draw = np.random.Generator(np.random.Philox(key=[seed, length * 1000 + round(depth * 100)]))
                right = 0
                for _ in range(samples):
                    start = int(draw.integers(0, max(len(filler) - length, 1)))
                    sample = task.make(filler[start : start + length], length, depth, draw)
                    right += _is_found(model, head, sample)
                    if watch is not None:
                        watch(length, length)
                rows.append({"length": length, "depth": depth, "accuracy": right / samples, "samples": samples})
        except (CableError, torch.OutOfMemoryError) as error:  # too short for the text, past a table, out of memory
            rows = [row for row in rows if row["length"] != length]
            rows.append({"length": length, **failure(error)})
            continue
        if keep is not None:
            keep(rows)
    return rows


@torch.inference_mode()
def _is_found(model: PreTrainedModel, head: Any, sample: Sample) -> bool:
    """If every token of the answer is the likeliest after those before it, greedy decoding writes just them."""
    ids = torch.from_numpy(sample.tokens).to(model.device)[None]
    with precision(model):
        if head is None:
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, -sample.answer :]
        else:
            hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = head(hidden[:, -sample.answer :])
    return bool((logits.argmax(-1) == ids[:, -sample.answer :]).all())
