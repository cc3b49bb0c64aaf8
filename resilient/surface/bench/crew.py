"""Worker processes of a bench: started, ready, then let go together; each answers with a dictionary.

Processes are spawned, never forked: a fork would share database connections. A bench's clock runs from the
common start to the last answer, so imports and connecting do not count.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Protocol

from resilient.core.errors import ResilientError
from resilient.surface.bench.cpu import own_cpu, own_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection


class BenchFailed(ResilientError):
    """A bench's process ended with an error."""


class Start(Protocol):
    """Called by a task when it is ready; returns when all are."""

    def __call__(self) -> None:
        """Wait for the others."""


@dataclass(frozen=True, slots=True)
class Crew:
    """What a crew did: ``seconds`` from the common start to the last answer, and each process's answer."""

    seconds: float
    answers: list[dict[str, Any]]

    @property
    def cpu(self) -> float:
        """CPU seconds of all processes, from the common start."""
        return float(sum(a["cpu_seconds"] for a in self.answers))

    @property
    def memory(self) -> float:
        """The most memory one process held, in megabytes."""
        return float(max(a["memory_mb"] for a in self.answers))

    def total(self, name: str) -> int:
        """The sum of one counter over all processes."""
        return int(sum(a[name] for a in self.answers))


def run_crew(
    task: Callable[..., dict[str, Any]],
    workers: int,
    *args: Any,
    numbered: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> Crew:
    """Run ``task(start, *args)`` in ``workers`` processes; ``task`` calls ``start()`` when it is ready.

    ``numbered`` puts each process's number before the other arguments; ``meanwhile`` is called here after
    the start. The end is the latest ``finished_at`` of the answers (``time.perf_counter``, which processes
    of a machine share), or the last answer. Raises `BenchFailed`.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(workers)]
    crew = [
        context.Process(target=_member, args=(theirs, task, (n, *args) if numbered else args), daemon=True)
        for n, (_, theirs) in enumerate(pipes)
    ]
    try:
        for process in crew:
            process.start()
        ours = [mine for mine, _ in pipes]
        for _, theirs in pipes:
            theirs.close()
        _gather(ours)
        began = time.perf_counter()
        for pipe in ours:
            pipe.send("go")
        if meanwhile is not None:
            meanwhile()
        answers = _gather(ours)
        ended = max(answer.get("finished_at") or time.perf_counter() for answer in answers)
        return Crew(ended - began, answers)
    except BaseException:
        for process in crew:
            process.kill()
        raise
    finally:
        for process in crew:
            process.join()


def _gather(pipes: Sequence[Connection]) -> list[Any]:
    """One message of each process, in their order; the first that fails ends the waiting for the others."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        ready: list[Any] = wait([pipe for n, pipe in enumerate(pipes) if n not in answers])
        for pipe in ready:
            try:
                good, answer = pipe.recv()
            except EOFError:
                raise BenchFailed("a bench worker process died; its own output above says why") from None
            if not good:
                raise BenchFailed(f"a bench worker process failed:\n{answer}")
            answers[pipes.index(pipe)] = answer
    return [answers[n] for n in range(len(pipes))]


def _member(pipe: Connection, task: Callable[..., dict[str, Any]], args: tuple[Any, ...]) -> None:
    began = 0.0

    def start() -> None:
        nonlocal began
        pipe.send((True, None))
        pipe.recv()
        began = own_cpu()

    try:
        answer = task(start, *args)
    except Exception:  # noqa: BLE001 - it is shown by the parent
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, answer | {"cpu_seconds": own_cpu() - began, "memory_mb": own_memory()}))
