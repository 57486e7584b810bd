"""Commands in processes of their own, some at a time, each on a GPU of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch


def run_in_processes(
    commands: dict[str, list[str]], logs: Path, jobs: int, watch: Callable[[str, str], None], own_gpus: bool = True
) -> dict[str, str]:
    """Each named command in a process, ``jobs`` at a time; the last line of those that failed.

    own_gpus: give each a GPU of those that are to be seen. A SIGTERM goes on to the processes, which save and stop.
    """
    gpus: SimpleQueue[str] = SimpleQueue()
    seen = visible_gpus() if own_gpus else []
    for job in range(jobs):
        gpus.put(seen[job % len(seen)] if seen else "")
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    stopping: list[int] = []

    def stop(number: int, frame: Any) -> None:
        stopping.append(number)
        for process in list(running.values()):
            process.terminate()

    def start(name: str) -> None:
        gpu = gpus.get()
        try:
            if stopping:
                failed[name] = "stopped before it began"
                return
            watch(name, "running")
            variables = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}
            log = logs / f"{name}.log"
            with log.open("wb") as file:
                running[name] = subprocess.Popen(commands[name], env=variables, stdout=file, stderr=subprocess.STDOUT)
                code = running[name].wait()
            if code:
                failed[name] = f"{_last_line(log) or f'exit code {code}'} ({log})"
        except OSError as error:
            failed[name] = f"cannot start {commands[name][0]!r}: {error.strerror}"
        finally:
            running.pop(name, None)
            watch(name, "failed" if name in failed else "done")
            gpus.put(gpu)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(start, commands))
    finally:
        signal.signal(signal.SIGTERM, before)
    return failed


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    if not torch.cuda.is_available():
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(n) for n in range(torch.cuda.device_count())]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
