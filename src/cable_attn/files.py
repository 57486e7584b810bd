"""Files: written so that none is ever half-written, and read so that what is wrong with one is told in a line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from cable_attn.errors import CableError, unknown

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

COMPRESSED: dict[str, Any] = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
"""How to open a file, by what its name ends with."""


def writable_folder(path: Path) -> Path:
    """Make the folder if need be, and prove that it can be written to before hours of work depend on it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CableError(f"cannot write to folder {str(path)!r}: {error.strerror}. Choose another.") from error
    return path


def writable_file(path: Path) -> Path:
    """The same for a file, which need not be there."""
    if path.is_dir():
        raise CableError(f"{str(path)!r} is a folder. Name a file in it.")
    writable_folder(path.parent)
    return path


class InUse(CableError):
    """By another process."""


@contextmanager
def alone(folder: Path, what: str) -> Iterator[None]:
    """Two processes never do the same work in one folder, which is there."""
    if fcntl is None:
        yield
        return
    lock = folder / f".{what}.lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), lock.stat()):  # of one that has just ended and a third
                raise FileExistsError
        except (BlockingIOError, FileExistsError, FileNotFoundError) as error:
            raise InUse(f"{str(folder)!r} is being worked on by another process.") from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file is the old one or the new one, never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, kind: type = dict) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CableError(f"cannot read {str(path)!r}: {error}. Delete it to make it anew.") from error
    if not isinstance(value, kind):
        raise CableError(f"{str(path)!r} holds no {kind.__name__}, but {value!r:.40}. Delete it to make it anew.")
    return value


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty."""
    open_file = COMPRESSED.get(path.suffix, open)
    try:
        with open_file(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parsed(path, number, line)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise CableError(f"cannot read {str(path)!r}: {error}.") from error


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CableError(f"{path}, line {number}: is not UTF-8 (byte {error.start}).") from error
    except ValueError as error:
        raise CableError(f"{path}, line {number}: is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise CableError(f"{path}, line {number}: wanted an object, got {type(row).__name__}.")
    return row


def packaged(folder: str) -> list[str]:
    """The names of the TOML files in a folder of the package."""
    names = [path.name for path in (files("cable_attn") / folder).iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read_toml(kind: str, name: str, folder: str) -> dict[str, Any]:
    """A TOML file by its path, or one of the package's by its name; ``kind`` is what errors call it."""
    path = Path(name)
    if name in packaged(folder):
        text = (files("cable_attn") / folder / f"{name}.toml").read_bytes()
    elif path.suffix == ".toml" and path.is_file():
        text = path.read_bytes()
    elif path.suffix == ".toml":
        raise CableError(f"there is no file {name!r}.")
    else:
        raise unknown(kind, name, [*packaged(folder), "a .toml file"])
    try:
        return tomllib.loads(text.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CableError(f"{kind} {name!r} is not TOML in UTF-8: {error}") from error


def as_json(value: Any) -> Any:
    """What it would be when it has been written and read."""
    return json.loads(json.dumps(value))
