"""How well a model predicts text that is longer than what it was trained on.

A window is a stretch of tokens that the model reads at once; each of its tokens predicts the next. Losses are summed by
document and by place in the window as they come, and logits exist for a few rows at a time, so that memory grows with
neither the text nor the length.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cable_attn.data.corpus import Document, embedded_corpus
from cable_attn.data.shards import TOKENIZER, Tokens
from cable_attn.data.tokenizers import load_tokenizer
from cable_attn.data.tokens import encode, require_window
from cable_attn.devices import has_bf16
from cable_attn.errors import CableError, reason

LOGIT_ELEMENTS = 2**26
"""How many logits may exist at once (256 MiB in fp32)."""
PLACES = 64
"""Into how many stretches a window is divided when losses are told by place: each as much longer than the last."""
FIRST_PLACES = 1024
"""The first of them is one part of so many of the window."""
RESAMPLES = 2000
DRAWN = 2**22
"""How many draws may exist at once."""
MOST_DOCUMENTS = 1000
"""Of so many each one's loss is kept."""

ByDocument = list[tuple[int, float]]
"""(tokens, mean loss) of each document."""


@dataclass(frozen=True)
class HeldOut:
    """A row of tokens to predict."""

    tokens: np.ndarray
    document_starts: np.ndarray
    source: str
    sha256: str
    """Of the shards' manifest, or of the tokens."""
    tokenizer: Any = None

    def first(self, count: int) -> HeldOut:
        return replace(self, tokens=self.tokens[:count])

    def beginnings(self, count: int) -> HeldOut:
        """Of each document the first ``count`` tokens, if it has them: a window of so many holds one document only.

        But for its last target, the first token of the next one.
        """
        ends = [*self.document_starts[1:], len(self.tokens)]
        long = [start for start, end in zip(self.document_starts, ends) if end - start >= count]
        if not long:
            raise CableError(f"no document of {self.source} has {count} tokens.")
        tokens = np.concatenate([self.tokens[start : start + count] for start in long])
        last = long[-1] + count  # the target of the last token
        tokens = np.concatenate([tokens, self.tokens[last : last + 1] if last < len(self.tokens) else tokens[:1]])
        return replace(self, tokens=tokens, document_starts=np.arange(len(long)) * count)

    def documents(self, targets: np.ndarray) -> np.ndarray:
        """The number of each target's document."""
        return np.searchsorted(self.document_starts, targets, side="right") - 1


def from_texts(documents: list[Document], tokenizer: Any, source: str) -> HeldOut:
    rows = [encode([document], tokenizer) for document in documents]
    tokens = np.concatenate(rows)
    starts = np.cumsum([0, *(len(row) for row in rows[:-1])])
    return HeldOut(tokens, starts, source, hashlib.sha256(tokens.tobytes()).hexdigest(), tokenizer)


def from_shards(folder: Path, split: str, limit: int | None = None, tokenizer: Any = None) -> HeldOut:
    shards = Tokens(folder, split)
    tokens = shards.slice(0, min(len(shards), (limit or len(shards)) + 1))
    return HeldOut(tokens, shards.document_starts, f"{folder}, {split}", shards.manifest_hash, tokenizer)


def find_held_out(path: str, split: str, tokens: int, tokenizer: Any, beginnings: int = 0) -> HeldOut:
    """``embedded`` (the test novel) or a folder of shards; at most about ``tokens`` of it, 0 for all.

    beginnings: only that of each document, so many tokens, where there are as many.
    """
    if beginnings:
        text = find_held_out(path, split, 0, tokenizer).beginnings(beginnings)
        return text.first(tokens // beginnings * beginnings + 1) if tokens else text
    if path != "embedded":
        return from_shards(Path(path), split, tokens or None, tokenizer)
    text = from_texts(embedded_corpus("test"), tokenizer, "embedded corpus, test")
    return text.first(tokens + 1) if tokens else text


def comparable(tokens: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """As much of ``tokens`` as every length cuts into whole windows, so that all predict the very same tokens; and one
    token more, the last target."""
    unit = math.lcm(*lengths)
    if len(tokens) <= unit:
        raise CableError(
            f"lengths {', '.join(map(str, lengths))} cut the same tokens into whole windows from {unit} on, and need "
            f"one more; the held-out text has {len(tokens)}. Choose lengths that divide each other."
        )
    return tokens[: (len(tokens) - 1) // unit * unit + 1]


def windows(tokens: int, length: int, stride: int | None = None) -> Iterator[tuple[int, int]]:
    """(first token read, first place in the window whose prediction counts) of each window.

    Without a stride the windows lie side by side. With one each begins ``stride`` tokens after the one before and only
    what that one has not predicted counts; the last ends with the text. So every target is predicted once, by the first
    window that reaches it.
    """
    targets = tokens - 1
    if stride is None:
        yield from ((start, 0) for start in range(0, targets - length + 1, length))
        return
    done = 0
    for start in range(0, targets, stride):
        start = min(start, targets - length)
        yield start, done - start
        done = start + length
        if done == targets:
            return


def drawn_anew(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """95 % of the perplexities when documents with these losses and tokens are drawn anew."""
    draw, each = np.random.default_rng(0), np.full(len(sums), 1 / len(sums))
    found: list[float] = []
    while len(found) < RESAMPLES:  # a few at a time: of many documents all of them would not fit into memory
        drawn = draw.multinomial(len(sums), each, min(RESAMPLES - len(found), max(DRAWN // len(sums), 1)))
        found += np.exp(drawn @ sums / (drawn @ counts)).tolist()
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def perplexity_over(ours: Sequence[ByDocument], theirs: Sequence[ByDocument]) -> tuple[float, float, float]:
    """One perplexity over another on the same documents, and 95 % of that when they are drawn anew; a mean of seeds."""
    counts = np.array([count for count, _ in ours[0]])
    losses, others = (np.mean([[loss for _, loss in one] for one in seeds], 0) for seeds in (ours, theirs))
    gaps = (losses - others) * counts
    return float(np.exp(gaps.sum() / counts.sum())), *drawn_anew(gaps, counts)


class Tally:
    """Losses in nats, summed by document and by place in the window."""

    def __init__(self, held_out: HeldOut, length: int):
        self.held_out = held_out
        documents = len(held_out.document_starts)
        self.sums, self.counts = np.zeros(documents), np.zeros(documents, np.int64)
        self.place_sums, self.place_counts = np.zeros(length), np.zeros(length, np.int64)

    def add(self, losses: np.ndarray, start: int, first: int) -> None:
        """One window's losses; ``first``: the place from which they count."""
        losses = losses[first:].astype(np.float64)
        targets = np.arange(start + first + 1, start + first + 1 + len(losses))
        documents = self.held_out.documents(targets)
        size = len(self.sums)
        self.sums += np.bincount(documents, losses, size)
        self.counts += np.bincount(documents, minlength=size)
        self.place_sums[first:] += losses
        self.place_counts[first:] += 1

    @property
    def loss(self) -> float:
        return float(self.sums.sum() / self.counts.sum())

    def interval(self) -> tuple[float, float] | None:
        """95 % of perplexities when documents are drawn anew; ``None`` for a single document."""
        seen = self.counts > 0
        if seen.sum() < 2:
            return None
        return drawn_anew(self.sums[seen], self.counts[seen])

    def by_document(self) -> ByDocument | None:
        """(tokens, mean loss) of each, so that two models can be compared on the same ones; not of very many."""
        seen = self.counts > 0
        if seen.sum() > MOST_DOCUMENTS:
            return None
        return [(int(count), float(total / count)) for total, count in zip(self.sums[seen], self.counts[seen])]

    def by_place(self) -> list[tuple[int, float]]:
        """(last place of a stretch, counted from 1; mean loss there)."""
        length = len(self.place_sums)
        edges = np.unique([0, *np.geomspace(length / FIRST_PLACES, length, PLACES).round().astype(int)])
        told = []
        for begin, end in pairwise(edges):
            count = self.place_counts[begin:end].sum()
            if count:
                told.append((int(end), float(self.place_sums[begin:end].sum() / count)))
        return told


def evaluate(
    model: PreTrainedModel,
    held_out: HeldOut,
    lengths: Sequence[int],
    *,
    stride: int | None = None,
    same_tokens: bool = False,
    batch_tokens: int = 4096,
    watch: Callable[[int, int], None] | None = None,
    known: Sequence[dict[str, Any]] = (),
    keep: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """A row of results for each length; ``watch(length, n)`` hears of every n tokens done.

    ``keep(rows)`` hears of the rows so far after each length; ``known``: those that an earlier call has kept.

    same_tokens: only what all lengths cut into whole windows, so that each is judged on equal targets. A length that
    the model cannot read (learned positions beyond their table) gives a row that says so, and one that did not fit
    into memory a row that may be otherwise the next time (``out_of_memory``).
    """
    if stride is not None and not 0 < stride <= min(lengths):
        raise CableError(f"stride must lie between 1 and the shortest length, {min(lengths)}, got {stride}.")
    if same_tokens:
        held_out = held_out.first(len(comparable(held_out.tokens, lengths)))
    require_window(held_out.tokens, max(lengths) + 1, "the held-out text")
    rows: list[dict[str, Any]] = []
    before = {row["length"]: row for row in known if "error" not in row}
    for length in lengths:
        if length in before:
            rows.append(before[length])
            if watch is not None:
                watch(length, before[length]["tokens"])
            continue
        try:
            if model.device.type == "cuda":  # kernels of this length are made before the clock runs
                measure(model, held_out.first(max(length, batch_tokens) + 1), length, stride, batch_tokens)
                torch.cuda.reset_peak_memory_stats(model.device)
            began = time.monotonic()
            tally = measure(model, held_out, length, stride, batch_tokens, watch)
            seconds = time.monotonic() - began
        except (CableError, torch.OutOfMemoryError) as error:
            rows.append({"length": length, **failure(error)})
            continue
        rows.append({"length": length, **_result(tally, held_out, stride), "seconds": seconds})
        if model.device.type == "cuda":
            rows[-1]["peak_memory_mib"] = round(torch.cuda.max_memory_allocated(model.device) / 2**20)
        if keep is not None:
            keep(rows)
    return rows


def failure(error: Exception) -> dict[str, Any]:
    """Of a length that was not read."""
    if isinstance(error, CableError):
        return {"error": str(error)}
    return {"error": reason(error), "out_of_memory": True}


def _result(tally: Tally, held_out: HeldOut, stride: int | None) -> dict[str, Any]:
    interval = tally.interval()
    count = int(tally.counts.sum())
    size = text_bytes(held_out.tokens[1 : count + 1], held_out.tokenizer)
    return {
        "perplexity": perplexity(tally.loss),
        "loss": tally.loss,
        "interval": None if interval is None else list(interval),
        "documents": int((tally.counts > 0).sum()),
        "tokens": count,
        "bits_per_byte": tally.loss * count / math.log(2) / size if size else None,
        "by_place": tally.by_place(),
        "by_document": tally.by_document(),
    }


def perplexity(loss: float) -> float:
    """Infinite for the worst."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def text_bytes(tokens: np.ndarray, tokenizer: Any) -> int | None:
    """How many bytes of text these tokens are."""
    if tokenizer is None:
        return None
    return len(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).encode())


def share_of(total: int, tell: Callable[[int, float], None]) -> Callable[[int, int], None]:
    """A ``watch`` that tells of the length that is read, and the share of all tokens to read that are done."""
    done = 0

    def watch(length: int, count: int) -> None:
        nonlocal done
        done += count
        tell(length, done / total)

    return watch


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    held_out: HeldOut,
    length: int,
    stride: int | None = None,
    batch_tokens: int = 4096,
    watch: Callable[[int, int], None] | None = None,
) -> Tally:
    """The losses of all windows."""
    model.eval()
    require_positions(model, length)
    head = output_head(model)
    tally = Tally(held_out, length)
    found = list(windows(len(held_out.tokens), length, stride))
    batch = max(batch_tokens // length, 1)
    for at in range(0, len(found), batch):
        group = found[at : at + batch]
        rows = torch.from_numpy(np.stack([held_out.tokens[start : start + length + 1] for start, _ in group]))
        losses = token_losses(model, head, rows.to(model.device))
        for (start, first), loss in zip(group, losses.cpu().numpy()):
            tally.add(loss, start, first)
        if watch is not None:
            watch(length, sum(length - first for _, first in group))
    return tally


def require_known_tokens(tokens: Any, model: Any, source: str) -> None:
    """Another tokenizer's may be past the end of the model's table."""
    least, largest, known = int(tokens.min()), int(tokens.max()), model.config.vocab_size
    if least < 0 or largest >= known:
        wrong = least if least < 0 else largest
        raise CableError(f"{source!r} has a token {wrong}, and the model knows {known}: its tokenizer is another.")


def require_own_tokens(tokenizer: Any, shards: Path, where: str) -> None:
    """Another tokenizer's would give a perplexity of nothing. ``tokenizer``: the model's, which lies ``where``."""
    made_with = shards / TOKENIZER
    if made_with.is_dir() and load_tokenizer(str(made_with)).get_vocab() != tokenizer.get_vocab():
        raise CableError(
            f"the tokens in {str(shards)!r} were made with another tokenizer than the model's. Prepare them with "
            f"--tokenizer {where}."
        )


def require_positions(model: torch.nn.Module, length: int) -> None:
    """A learned table of positions ends somewhere; on a GPU reading past it would kill the process."""
    for positions in learned_positions(model):
        if positions < length:
            raise CableError(f"the model has {positions} learned positions, {length} tokens need more.")


def learned_positions(model: torch.nn.Module) -> list[int]:
    """How many tokens each learned table of positions has room for."""
    found = []
    for name, module in model.named_modules():
        is_table = name.rpartition(".")[2] in ("wpe", "embed_positions", "position_embeddings")
        is_off = hasattr(module, "_cable_hooks")  # add_cable has switched it off
        if is_table and not is_off and isinstance(module, torch.nn.Embedding):
            padding = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa's places begin behind it
            found.append(module.num_embeddings - padding - int(getattr(module, "offset", 0)))
    return found


Head = Callable[[Tensor], Tensor]


def output_head(model: PreTrainedModel) -> Head | None:
    """What makes logits of the last hidden states, or ``None`` if the model does more than one linear map there."""
    head: Any = model.get_output_embeddings()
    ids = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
    with precision(model):
        whole = model(input_ids=ids, use_cache=False).logits
        parts = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state) if head is not None else None
    same = parts is not None and torch.allclose(parts.float(), whole.float(), rtol=1e-2, atol=1e-2)
    return head if same else None


def token_losses(model: PreTrainedModel, head: Head | None, rows: Tensor) -> Tensor:
    """The loss of each prediction [B, T] in a batch of windows [B, T + 1], few logits at a time."""
    x, y = rows[:, :-1], rows[:, 1:]
    with precision(model):
        if head is None:
            logits = model(input_ids=x, use_cache=False).logits.flatten(0, 1)
            return _cross_entropy(logits, y.flatten()).view_as(y)
        hidden = model.base_model(input_ids=x, use_cache=False).last_hidden_state.flatten(0, 1)
        size = max(LOGIT_ELEMENTS // model.config.vocab_size, 1)
        parts = zip(hidden.split(size), y.flatten().split(size))
        return torch.cat([_cross_entropy(head(part), target) for part, target in parts]).view_as(y)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")


def precision(model: PreTrainedModel) -> Any:
    """bf16 products on GPUs that have them, as in training; elsewhere the model's own precision."""
    device = model.device.type
    enabled = device == "cuda" and model.dtype == torch.float32 and has_bf16()
    return torch.autocast(device, torch.bfloat16, enabled=enabled)


def checkpoint_hash(folder: Path) -> str:
    """Of the config and the weights, whatever else lies in the folder."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
