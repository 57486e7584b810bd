"""What a measurement or a run was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """Commit, GPU and versions."""
    packages = {}
    for name in ("torch", "triton", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "commit": _commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": packages,
    }


def _commit() -> str | None:
    """Of the checkout, or ``CABLE_COMMIT`` where the code runs without one."""
    if given := os.environ.get("CABLE_COMMIT"):
        return given
    root = Path(__file__).parents[2]
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None  # installed somewhere below a repository of the user's
        return _git(root, "describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
