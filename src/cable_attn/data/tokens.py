"""From text to tokens."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cable_attn.data.corpus import Document
from cable_attn.errors import CableError

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"


def train_bpe(documents: list[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's, with a token for masked words; about a second for a few megabytes of documents."""
    special = [END_OF_TEXT, MASK]
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + len(special)
    if vocab_size < smallest:
        raise CableError(f"a byte-level vocabulary needs at least {smallest} entries, got vocab_size={vocab_size}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
    )


def separator_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What stands before each document."""
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id)
    return next((token for token in ids if token is not None), None)


def encode(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """All documents in one row of token ids, the separator before each."""
    token = separator_of(tokenizer)
    separator = [] if token is None else [token]
    options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    rows = tokenizer([document.text for document in documents], **options)["input_ids"]
    return np.concatenate([np.asarray(separator + row, dtype=np.int64) for row in rows])


def require_window(tokens: Sized, length: int, what: str) -> None:
    if len(tokens) < length:
        raise CableError(
            f"{what} has {len(tokens)} tokens, fewer than one window of {length}. Give more text or a shorter length."
        )
