"""From token shards to training samples, the same for every number of processes, and resumable at any of them."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from cable_attn.data.shards import Tokens
from cable_attn.data.tokens import require_window
from cable_attn.errors import CableError

IGNORED = -100


class TokenWindows(Dataset):
    """Non-overlapping windows of a split. ``separate``: with ``document_ids``, and no document predicts the next."""

    def __init__(self, tokens: Tokens, length: int, separate: bool = False):
        require_window(tokens, length, "the split")
        self.tokens, self.length, self.separate = tokens, length, separate

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _leave_signals_to_the_run()
        start = index * self.length
        ids = torch.from_numpy(self.tokens.slice(start, start + self.length))
        sample = {"input_ids": ids, "labels": ids}
        if self.separate:
            documents = torch.from_numpy(self.tokens.document_ids(start, start + self.length))
            begins = torch.ones_like(documents, dtype=torch.bool)
            begins[1:] = documents[1:] != documents[:-1]
            sample = {"input_ids": ids, "labels": ids.masked_fill(begins, IGNORED), "document_ids": documents}
        return sample


def _leave_signals_to_the_run() -> None:
    """A worker that is ended while the run saves, or tests itself, would take the run along."""
    if get_worker_info() is not None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


class Order(Dataset):
    """All samples of a run in their order: epoch after epoch, each window once an epoch, shuffled by the seed.

    A sample's place says everything about it, so a run resumes at the exact sample by skipping places.
    """

    def __init__(self, windows: Dataset, seed: int, samples: int):
        self.windows, self.seed, self.samples = windows, seed, samples
        self._epoch, self._permutation = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self.samples

    def window(self, place: int) -> int:
        count = len(self.windows)  # type: ignore[arg-type]
        epoch, place = divmod(place, count)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._epoch, self._permutation = epoch, generator.permutation(count)
        return int(self._permutation[place])

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return self.windows[self.window(place)]


class Masked(Dataset):
    """Masked-token samples of a dataset: 80 % of the chosen tokens masked, 10 % random, 10 % kept.

    The choice depends on the seed and the sample's place only, so that a resumed run sees the same.
    """

    def __init__(self, samples: Dataset, tokenizer: Any, share: float, seed: int):
        from transformers import DataCollatorForLanguageModeling

        if tokenizer is None or tokenizer.mask_token_id is None:
            raise CableError(
                "masked tokens need a tokenizer with a mask token, and the data's has none. "
                "Prepare it with --tokenizer bert-base-uncased or bpe:SIZE."
            )
        self.samples, self.seed = samples, seed
        self.collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=share)
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))
        self.mask: int = tokenizer.mask_token_id

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        sample = dict(self.samples[place])
        self.collator.generator = torch.Generator().manual_seed(self.seed * 1_000_003 + place)
        ids = sample["input_ids"][None]
        special = torch.isin(ids, self.special)
        masked, labels = self.collator.torch_mask_tokens(ids.clone(), special)
        if bool((labels < 0).all()) and not bool(special.all()):  # a window without anything to predict has no loss
            words = torch.nonzero(~special[0])[:, 0]
            chosen = words[torch.randint(len(words), (1,), generator=self.collator.generator)]
            masked[0, chosen], labels[0, chosen] = self.mask, ids[0, chosen]
        return {**sample, "input_ids": masked[0], "labels": labels[0]}
