"""Writing so that nothing is ever half-written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from cable_attn.errors import CableError


def writable_folder(path: Path) -> Path:
    """Make the folder if need be, and prove that it can be written to before hours of work depend on it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CableError(
            f"cannot write to folder {str(path)!r}: {error.strerror}. Choose another with --out."
        ) from error
    return path


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


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CableError(f"cannot read {str(path)!r}: {error}. Delete it to make it anew.") from error


def as_json(value: Any) -> Any:
    """What it would be when it has been written and read."""
    return json.loads(json.dumps(value))
