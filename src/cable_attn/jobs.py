"""Commands in processes of their own: some at a time, each on a GPU of its own, or measured one after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

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
            variables = {
                **(_fair_share(jobs) if own_gpus else {}),
                **os.environ,
                **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
            }
            log = logs / f"{name}.log"
            with log.open("wb") as file:
                running[name] = subprocess.Popen(commands[name], env=variables, stdout=file, stderr=subprocess.STDOUT)
                if stopping:  # it came in between
                    running[name].terminate()
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
    pool = ThreadPoolExecutor(jobs)
    try:
        left = {pool.submit(start, name) for name in commands}
        while left:  # again and again: a signal just before a wait without end would be heard after it
            done, left = wait(left, timeout=0.2)
            for future in done:
                future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before)
    if stopping:
        raise SystemExit(128 + stopping[0])
    return failed


class Process(ABC):
    """A command that gets ready, is measured, and ends."""

    process: subprocess.Popen[bytes]
    log: Path
    variables: dict[str, str] = {}
    """Of its environment, where the user's has no others."""

    @abstractmethod
    def start(self, alone: bool) -> None:
        """alone: nobody else runs, so there is no turn to wait for."""

    @property
    @abstractmethod
    def warm(self) -> bool:
        """Ready to be measured, and not yet begun."""

    @abstractmethod
    def begin(self) -> None:
        """From now on it is alone."""

    @property
    @abstractmethod
    def measured(self) -> bool:
        """Others may go on."""

    def open(self, command: list[str], log: Path, **variables: str) -> None:
        self.log = log
        known = {**self.variables, **os.environ, **variables}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=known
            )

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)  # with its workers, which compile

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def failure(self) -> str:
        return (_last_line(self.log) or f"exit code {self.process.returncode}")[-300:]


P = TypeVar("P", bound=Process)


def in_turn(processes: list[P], jobs: int) -> Iterator[P]:
    """Start them, ``jobs`` at a time, and measure one at a time, while the others are stopped; each as it ends."""
    waiting, running = list(processes), list[P]()
    current: P | None = None
    before = signal.signal(signal.SIGTERM, _end)
    try:
        while waiting or running:
            while waiting and len(running) < jobs and current is None:
                running.append(waiting.pop(0))
                running[-1].variables = _fair_share(jobs)
                running[-1].start(alone=jobs == 1)
            if current is None:
                current = next((process for process in running if process.warm), None)
                if current is not None:
                    _send(signal.SIGSTOP, running, but=current)
                    current.begin()
            elif current.measured:
                current = None
                _send(signal.SIGCONT, running)
            ended = [process for process in running if process.ended]
            running = [process for process in running if process not in ended]
            if current in ended:  # it failed
                current = None
                _send(signal.SIGCONT, running)
            yield from ended
            time.sleep(0.05)
    finally:
        _send(signal.SIGKILL, running)
        for process in running:
            process.process.wait()
        signal.signal(signal.SIGTERM, before)


def _fair_share(jobs: int) -> dict[str, str]:
    """Of the processors, to compile: otherwise each job starts as many compilers as there are, each with a PyTorch."""
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _send(number: int, processes: Sequence[Process], but: Process | None = None) -> None:
    for process in processes:
        if process is not but:
            process.send(number)


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    if not torch.cuda.is_available():
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(n) for n in range(torch.cuda.device_count())]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
