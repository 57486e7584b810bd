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
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
