"""The demo's other processes: the provider and the workers.

They end with this one: each reads a pipe that closes when its parent dies. Only what was started here is
ever killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

from resilient.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_PATIENCE: Final = 10.0  # seconds for a process to stop
_TAIL: Final = 15  # lines of a dead worker's log that are shown


@contextmanager
def running_provider(log: Path, troubles: Mapping[str, Any], secret: str) -> Iterator[dict[str, str]]:
    """The provider's process; yields its addresses, ``steady`` and ``fragile``, and that of the webhook, ``sink``."""
    arguments = ("--log", str(log), "--plan", json.dumps(troubles), "--secret", secret)
    process = _start("serve", *arguments, stdout=subprocess.PIPE)
    try:
        line = process.stdout.readline() if process.stdout else b""
        if not line:
            raise SetupError("the demo's provider did not start; what it said stands above")
        ports = json.loads(line)
        yield {name: f"http://127.0.0.1:{ports[name]}" for name in ("steady", "fragile", "sink")}
    finally:
        _end(process)


class Crew:
    """The worker processes. ``settings`` is what ``resilient.surface.demo.app`` reads."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._settings, self._folder = json.dumps(settings), folder
        self._alive: list[subprocess.Popen[bytes]] = []
        self._started = 0

    def __enter__(self) -> Self:
        """Nobody is hired yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nobody behind."""
        self.stop()

    def hire(self) -> str:
        """Start a worker; its name."""
        self._started += 1
        with (self._folder / f"worker-{self._started}.log").open("wb") as log:
            worker = _start("app", self._settings, stderr=log)
        self._alive.append(worker)
        return f"worker {self._started} (pid {worker.pid})"

    def kill_if_busy(self, running: Mapping[int, int]) -> str | None:
        """SIGKILL a worker that has jobs running (``running``: by process id) and say so; None: none has."""
        for worker in self._alive:
            if jobs := running.get(worker.pid):
                worker.kill()
                self._alive.remove(worker)
                _end(worker)
                return f"a worker (pid {worker.pid}) was killed with SIGKILL; jobs it held: {jobs}"
        return None

    def check(self) -> None:
        """Raise `SetupError` if a worker ended that nobody killed, with the end of its log."""
        for worker in self._alive:
            if worker.poll() is not None:
                logs = sorted(self._folder.glob("worker-*.log"))
                tail = [line for log in logs for line in log.read_text().splitlines()[-_TAIL:]]
                raise SetupError(f"a worker ended by itself, status {worker.returncode}:\n" + "\n".join(tail))

    def stop(self) -> None:
        """Stop all of them gracefully."""
        for worker in self._alive:
            worker.terminate()
        for worker in self._alive:
            _end(worker)
        self._alive.clear()


def _start(module: str, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"resilient.surface.demo.{module}", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, **streams)  # noqa: S603 - our own modules


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
