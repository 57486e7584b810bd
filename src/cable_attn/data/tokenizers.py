"""Tokenizers by one name each: GPT-2's BPE, any of Hugging Face, or a BPE learned on the spot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cable_attn.data.corpus import Document
from cable_attn.data.tokens import separator_of, train_bpe
from cable_attn.errors import CableError, reason

LEARN_FROM = 50_000_000
"""Characters that a BPE is learned from."""


class TextTokenizer(Protocol):
    vocab_size: int
    separator: int | None
    """Put before each document."""

    def encode(self, texts: list[str]) -> list[np.ndarray]: ...

    def save(self, folder: Path) -> None: ...


class HuggingFaceTokenizer:
    def __init__(self, tokenizer: Any):
        self.tokenizer, self.vocab_size = tokenizer, len(tokenizer)
        self.separator = separator_of(tokenizer)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        rows = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        return [np.asarray(row, dtype=np.uint32) for row in rows]

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


class TiktokenTokenizer:
    """GPT-2's own; the ids are those of Hugging Face's gpt2."""

    def __init__(self) -> None:
        self.separator: int | None = 50256
        try:
            import tiktoken
        except ImportError as error:
            raise CableError("tokenizer 'tiktoken' needs the package: pip install 'cable-attn[data]'.") from error
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except Exception as error:
            raise CableError(
                "tiktoken cannot fetch its gpt2 files. Without a network, set TIKTOKEN_CACHE_DIR to a folder that has "
                "them, or give a folder with vocab.json and merges.txt as --tokenizer."
            ) from error
        self.vocab_size = self.encoding.n_vocab

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.asarray(row, dtype=np.uint32) for row in self.encoding.encode_ordinary_batch(texts)]

    def save(self, folder: Path) -> None:
        """The manifest's name is enough to make it again."""


def find_tokenizer(name: str, documents: Iterable[Document]) -> TextTokenizer:
    """name: ``tiktoken``, ``bpe:SIZE`` (learned from the documents), or a name or folder for ``AutoTokenizer``."""
    if name == "tiktoken":
        return TiktokenTokenizer()
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not size.isdigit():
            raise CableError(f"tokenizer {name!r}: the size of the vocabulary must be a number, as in bpe:4096.")
        return HuggingFaceTokenizer(train_bpe(_some(documents), int(size)))
    return HuggingFaceTokenizer(load_tokenizer(name))


def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer, GPT2TokenizerFast  # type: ignore[attr-defined]

    folder = Path(name)
    try:
        if (folder / "vocab.json").is_file() and not (folder / "tokenizer.json").is_file():
            return GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the file or the network did
        raise CableError(
            f"tokenizer {name!r} cannot be loaded: {reason(error)}. "
            "Allowed: tiktoken, bpe:SIZE, a Hugging Face name, or a folder that holds a tokenizer."
        ) from error


def _some(documents: Iterable[Document]) -> list[Document]:
    """The first documents, as many as a BPE needs."""
    found, characters = [], 0
    for document in documents:
        found.append(document)
        characters += len(document.text)
        if characters >= LEARN_FROM:
            break
    return found
