"""Token shards on disk: written once, memory-mapped ever after.

A folder holds ``manifest.json``, ``SPLIT-00000.bin`` (token ids, uint16 or uint32, little-endian, each document after
a separator) and ``SPLIT-00000.documents.npy`` (where each document begins in its shard). The manifest tells tokenizer,
counts and hashes. It is written anew after each shard, so that a run that was cut off goes on from there.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cable_attn.data.corpus import Document
from cable_attn.data.sources import HUB, Stream, state_of
from cable_attn.data.tokenizers import HuggingFaceTokenizer, TextTokenizer, load_tokenizer
from cable_attn.errors import CableError, require_known
from cable_attn.files import read_json, writable_folder, write_atomically, write_json

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
"""Its folder, beside the tokens."""
STATE = "source.sha256"
"""What local files were like when their tokens were made."""
SHARD_TOKENS = 100_000_000
BATCH = 256
"""Documents tokenized at a time; the tokenizers use all cores for a batch."""
VERSION = 1

OnTokens = Callable[[str, int], None]
"""``tell(split, tokens)`` as tokens are written."""


@dataclass(frozen=True)
class Request:
    """What a folder of shards was asked to hold; another request never mixes with it."""

    source: str
    tokenizer: str
    tokens: int | None = None
    """Stop after so many tokens of each split."""
    shard_tokens: int = SHARD_TOKENS
    column: str = "text"
    held_out: float | None = None


def prepare(
    folder: Path, request: Request, streams: dict[str, Stream], tokenizer: TextTokenizer, tell: OnTokens | None = None
) -> dict[str, Any]:
    """Write the shards that are not there yet; the manifest."""
    was_there = folder.is_dir() and any(folder.iterdir())
    writable_folder(folder)
    manifest = _begin(folder, request, tokenizer.vocab_size, tokenizer.separator, list(streams), tokenizer.save)
    if (folder / TOKENIZER).is_dir():  # a learned one is never learned twice
        tokenizer = HuggingFaceTokenizer(load_tokenizer(str(folder / TOKENIZER)))
    for split, stream in streams.items():
        entry = manifest["splits"][split]
        if entry["complete"]:
            continue
        for shard, documents in _cut(stream(entry["documents"]), entry["tokens"], request, tokenizer, split, tell):
            if len(shard):
                _add_shard(folder, manifest, split, shard, documents)
        entry["complete"] = True
        write_json(folder / MANIFEST, manifest)
    empty = [split for split in streams if manifest["splits"][split]["tokens"] < 2]  # a separator is no text
    if "train" in empty or len(empty) == len(streams):
        if not was_there:
            shutil.rmtree(folder)  # which holds nothing else
        raise CableError(f"source {request.source!r} has no text for {', '.join(empty)}.")
    return manifest


def holds(folder: Path, request: Request) -> bool:
    """Whether all that is asked for is there already."""
    try:
        manifest = read_manifest(folder)
    except CableError:
        return False
    same = manifest["request"] == _asked(request) and manifest["tokenizer"]["name"] == request.tokenizer
    return same and _is_unchanged(folder, request) and all(entry["complete"] for entry in manifest["splits"].values())


def _is_unchanged(folder: Path, request: Request) -> bool:
    """Whether local files are those that the tokens were made of; not in the manifest, whose hash names the tokens."""
    path = folder / STATE
    return not path.is_file() or path.read_text(encoding="utf-8") == state_of(request.source)


def _asked(request: Request) -> dict[str, Any]:
    return {key: value for key, value in asdict(request).items() if key != "tokenizer"}


def import_tokens(
    folder: Path,
    files: dict[str, Path],
    vocab_size: int,
    separator: int,
    tokenizer: TextTokenizer | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> dict[str, Any]:
    """Shards of tokens made elsewhere: uint16 files (also .xz), a separator before each document.

    tokenizer: the one that made them, to be kept with them.
    """
    texts = {split: _read_tokens(path, vocab_size, separator) for split, path in files.items()}  # all good, or nothing
    source = ",".join(f"{split}={path.name}" for split, path in files.items())
    request = Request(source, "imported", None, shard_tokens)
    writable_folder(folder)
    save = None if tokenizer is None else tokenizer.save
    manifest = _begin(folder, request, vocab_size, separator, list(files), save)
    for split, tokens in texts.items():
        entry = manifest["splits"][split]
        if entry["complete"]:
            _require_same(folder, split, tokens, files[split])
            continue
        begins = np.flatnonzero(tokens == separator)
        while entry["tokens"] < len(tokens):
            start = entry["tokens"]
            later = begins[begins >= start + shard_tokens]
            stop = int(later[0]) if len(later) else len(tokens)
            inside = begins[(begins >= start) & (begins < stop)] - start
            _add_shard(folder, manifest, split, tokens[start:stop], inside.tolist())
        entry["complete"] = True
        write_json(folder / MANIFEST, manifest)
    return manifest


def _require_same(folder: Path, split: str, tokens: np.ndarray, path: Path) -> None:
    held = Tokens(folder, split)
    if len(held) != len(tokens) or not np.array_equal(held.slice(0, len(held)), tokens):
        raise CableError(
            f"{str(path)!r} is not what {str(folder)!r} holds for {split}. Choose another folder, or delete that one."
        )


def _read_tokens(path: Path, vocab_size: int, separator: int) -> np.ndarray:
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        tokens = np.frombuffer(content, dtype="<u2")
    except OSError as error:
        raise CableError(f"cannot read {str(path)!r}: {error.strerror}.") from error
    except (ValueError, EOFError, lzma.LZMAError) as error:
        raise CableError(f"{str(path)!r} is not a file of uint16 tokens: {error}.") from error
    if len(tokens) and tokens.max() >= vocab_size:
        raise CableError(f"{str(path)!r} has the token {tokens.max()}; the vocabulary has {vocab_size}.")
    if not len(tokens) or tokens[0] != separator:
        raise CableError(f"{str(path)!r} does not begin with the separator {separator}.")
    return tokens


def _begin(
    folder: Path,
    request: Request,
    vocab_size: int,
    separator: int | None,
    splits: list[str],
    save_tokenizer: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """The manifest of this request: the one that is there, or a new one."""
    asked = _asked(request)
    described = {"name": request.tokenizer, "vocab_size": vocab_size, "separator": separator}
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest["request"] == asked and not _is_unchanged(folder, request):
            raise CableError(
                f"{request.source!r} has changed since its tokens were made. Choose another folder, or delete "
                f"{str(folder)!r}."
            )
        before = {"tokenizer": manifest["tokenizer"]["name"], **manifest["request"], **manifest["tokenizer"]}
        now = {"tokenizer": request.tokenizer, **asked, "vocab_size": vocab_size, "separator": separator}
        changed = [f"{key} was {before.get(key)!r} and is {now[key]!r}" for key in now if before.get(key) != now[key]]
        if changed:
            raise CableError(
                f"{str(folder)!r} holds tokens of another request: {'; '.join(changed)}. Choose another folder, or "
                "delete this one."
            )
        _keep_tokenizer(folder, save_tokenizer)
        return manifest
    if any(path.name != STATE and not path.name.endswith(".partial") for path in folder.iterdir()):
        raise CableError(f"{str(folder)!r} is not empty and holds no {MANIFEST}. Choose another folder.")
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    empty = {split: {"tokens": 0, "documents": 0, "shards": [], "complete": False} for split in splits}
    manifest = {"version": VERSION, "request": asked, "tokenizer": described, "dtype": dtype, "splits": empty}
    if state := state_of(request.source):
        write_atomically(folder / STATE, state)
    write_json(folder / MANIFEST, manifest)
    _keep_tokenizer(folder, save_tokenizer)
    return manifest


def _keep_tokenizer(folder: Path, save_tokenizer: Callable[[Path], None] | None) -> None:
    """Beside the tokens, whole or not at all."""
    if save_tokenizer is not None and not (folder / TOKENIZER).is_dir():
        save_tokenizer(folder / "tokenizer.partial")
        if (folder / "tokenizer.partial").is_dir():  # some have no files
            (folder / "tokenizer.partial").rename(folder / TOKENIZER)


def _cut(
    documents: Iterator[Document],
    already: int,
    request: Request,
    tokenizer: TextTokenizer,
    split: str,
    tell: OnTokens | None,
) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Whole documents gathered into shards: the tokens, and where documents begin."""
    separator = np.asarray([] if tokenizer.separator is None else [tokenizer.separator], dtype=np.uint32)
    parts: list[np.ndarray] = []
    begins: list[int] = []
    size, left = 0, None if request.tokens is None else request.tokens - already
    while batch := list(islice(documents, BATCH)):
        for row in tokenizer.encode([document.text for document in batch]):
            if left is not None and left <= 0:
                break
            row = np.concatenate([separator, row])[:left]
            begins.append(size)
            parts.append(row)
            size += len(row)
            left = None if left is None else left - len(row)
            if tell is not None:
                tell(split, len(row))
            if size >= request.shard_tokens:
                yield np.concatenate(parts), begins
                parts, begins, size = [], [], 0
        if left is not None and left <= 0:
            break
    yield np.concatenate([np.zeros(0, np.uint32), *parts]), begins


def _add_shard(folder: Path, manifest: dict[str, Any], split: str, tokens: np.ndarray, begins: list[int]) -> None:
    """Write a shard and, once it is whole, the manifest that knows it."""
    entry = manifest["splits"][split]
    name = f"{split}-{len(entry['shards']):05d}"
    content = tokens.astype(np.dtype(manifest["dtype"]).newbyteorder("<")).tobytes()
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(begins, dtype=np.int64))
    write_atomically(folder / f"{name}.documents.npy", buffer.getvalue())
    write_atomically(folder / f"{name}.bin", content)
    entry["shards"].append(
        {
            "file": f"{name}.bin",
            "tokens": len(tokens),
            "documents": len(begins),
            "sha256": hashlib.sha256(content).hexdigest(),
            "documents_sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        }
    )
    entry["tokens"] += len(tokens)
    entry["documents"] += len(begins)
    write_json(folder / MANIFEST, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        source = folder.name if folder.name in HUB else "SOURCE"
        raise CableError(f"no prepared tokens in {str(folder)!r}. Make them: cable data prepare {source} {folder}")
    manifest: dict[str, Any] = read_json(path)
    if manifest.get("version") != VERSION:
        raise CableError(f"{path}: version {manifest.get('version')} is not known here (known: {VERSION}).")
    return manifest


def verify(folder: Path, tell: Callable[[str], None] | None = None) -> list[str]:
    """The shards that are missing, cut off or altered, each with what is wrong."""
    manifest = read_manifest(folder)
    wrong = []
    for split, entry in manifest["splits"].items():
        if not entry["complete"]:
            wrong.append(f"{split}: not complete, run cable data prepare again")
        for shard in entry["shards"]:
            if tell is not None:
                tell(shard["file"])
            problem = _size_problem(folder, shard, manifest["dtype"])
            if problem is not None:
                wrong.append(problem)
                continue
            for path, expected in (
                (folder / shard["file"], shard["sha256"]),
                (_documents(folder, shard), shard["documents_sha256"]),
            ):
                if not path.is_file():
                    wrong.append(f"{path.name}: missing")
                elif _sha256(path) != expected:
                    wrong.append(f"{path.name}: altered, its hash is not that of the manifest")
    return wrong


def _documents(folder: Path, shard: dict[str, Any]) -> Path:
    return folder / shard["file"].replace(".bin", ".documents.npy")


def _size_problem(folder: Path, shard: dict[str, Any], dtype: str) -> str | None:
    path, expected = folder / shard["file"], shard["tokens"] * np.dtype(dtype).itemsize
    if not path.is_file():
        return f"{shard['file']}: missing"
    if path.stat().st_size != expected:
        return f"{shard['file']}: has {path.stat().st_size} bytes, {expected} are expected"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Tokens:
    """A split as one long row of tokens, memory-mapped."""

    def __init__(self, folder: Path, split: str):
        self.origin = (folder, split)
        manifest = read_manifest(folder)
        require_known("split", split, manifest["splits"])
        entry = manifest["splits"][split]
        if not entry["complete"]:
            raise CableError(f"{str(folder)!r}: split {split!r} is not complete. Run cable data prepare again.")
        for shard in entry["shards"]:
            if problem := _size_problem(folder, shard, manifest["dtype"]):
                raise CableError(f"{str(folder)!r}: {problem}. Delete the folder and prepare it again.")
        dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self.manifest_hash = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        self.parts = [np.memmap(folder / shard["file"], dtype=dtype, mode="r") for shard in entry["shards"]]
        self.starts = np.cumsum([0, *(len(part) for part in self.parts)])
        files = [_documents(folder, shard) for shard in entry["shards"]]
        try:
            begins = [np.load(file) + start for file, start in zip(files, self.starts)]
        except (OSError, ValueError) as error:
            raise CableError(f"{str(folder)!r}: {error}. cable data verify tells more.") from error
        self.document_starts = np.concatenate([np.zeros(0, np.int64), *begins])

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files itself."""
        return Tokens, self.origin

    def __len__(self) -> int:
        return int(self.starts[-1])

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop as int64, also across shards."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < stop:
            part, offset = self.parts[first], start - self.starts[first]
            pieces.append(part[offset : offset + stop - start].astype(np.int64))
            start, first = start + len(pieces[-1]), first + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int64), *pieces])

    def document_ids(self, start: int, stop: int) -> np.ndarray:
        """For each token the number of its document."""
        return np.searchsorted(self.document_starts, np.arange(start, stop), side="right") - 1
