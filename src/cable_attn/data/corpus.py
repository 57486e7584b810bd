"""Texts to learn from: the embedded corpus, or the user's own files."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from cable_attn.errors import CableError, require_known

EMBEDDED = {
    "train": ("emma", "mansfieldpark", "prideprejudice", "sensesensibility"),
    "validation": ("persuasion",),
    "test": ("northangerabbey",),
}
"""Jane Austen's novels, split by whole novels; data/embedded/SOURCE.txt says where they come from."""


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def embedded_corpus(split: str) -> list[Document]:
    """One split of the corpus that comes with the package: ``train``, ``validation`` or ``test``."""
    require_known("split", split, EMBEDDED)
    folder = files("cable_attn.data") / "embedded"
    return [
        Document(name, lzma.decompress((folder / f"{name}.txt.xz").read_bytes()).decode()) for name in EMBEDDED[split]
    ]


def read_texts(path: Path) -> list[Document]:
    """A text file, or all ``.txt`` files of a folder, in the order of their names."""
    if not path.exists():
        raise CableError(f"no such file or folder: {str(path)!r}.")
    paths = sorted(path.glob("**/*.txt")) if path.is_dir() else [path]
    documents = [Document(file.name, read_text(file)) for file in paths]
    if not any(document.text.strip() for document in documents):
        what = f"folder {str(path)!r} has no .txt file with text" if path.is_dir() else f"{str(path)!r} is empty"
        raise CableError(f"{what}. Give a text file, or a folder of .txt files.")
    return documents


def read_text(path: Path) -> str:
    """A file as UTF-8; what is wrong with it in one line."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CableError(f"{str(path)!r} is not UTF-8 (byte {error.start}). Convert it, or leave it out.") from error
    except OSError as error:
        raise CableError(f"cannot read {str(path)!r}: {error.strerror}.") from error


def hold_out(documents: list[Document], share: float = 0.1) -> tuple[list[Document], list[Document]]:
    """Training and held-out text: whole documents from the end, or the end of the text if there is only one."""
    if len(documents) > 1:
        kept = max(1, round(len(documents) * (1 - share)))
        kept = min(kept, len(documents) - 1)
        return documents[:kept], documents[kept:]
    (document,) = documents
    cut = round(len(document.text) * (1 - share))
    return [Document(document.name, document.text[:cut])], [Document(document.name, document.text[cut:])]
