"""The application that a bench runs, the worker processes that run it, and the figures of both.

Its handlers do nothing, or one request. The processes are started, wait until all are ready, and begin together; each
answers with a dictionary. They are spawned, never forked: a fork would share database connections. A bench's clock runs
from the common start to the last answer, so imports and connecting do not count, nor, in `work`, planning.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from resilient import BreakerPolicy, Job, Limit, Resilient, Retry, Tracing, Transient, handler
from resilient.core.base.errors import MissingExtra, ResilientError
from resilient.surface.loop import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableSequence, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    import psycopg

    from resilient.engine.run.worker import Worker
    from resilient.surface.scratch import Scratch

ROOT: Final = "bench"
WARM: Final = "warm"  # the keys of jobs that run before the clock starts begin with it
DOWN: Final = f"{ROOT}/down"
_ROOMY: Final = 10_000_000.0  # limits that cost their work and stop nobody


@handler("bench.noop")
async def noop(job: Job[int]) -> None:
    """Do nothing."""


@handler("bench.warm")
async def warm(job: Job[None]) -> None:
    """Do nothing, before the clock runs."""


@handler("bench.down", retry=Retry(max_attempts=None, delay=600))
async def down(job: Job[int]) -> None:  # noqa: ARG001 - handlers take a job
    """Find that the account is down: an execution that was of no use."""
    raise Transient("the bench's account is down")


@handler("bench.stamp")
async def stamp(job: Job[int]) -> None:
    """Say when the job started."""
    started: dict[int, float] = job.deps
    started[job.payload] = time.perf_counter()


@handler("bench.get")
async def get(job: Job[str]) -> None:
    """One request."""
    response = await job.client.get(job.payload)
    response.raise_for_status()


def build(
    place: Scratch, *, limits: bool = False, deps: Any = None, sampled: float = 0.0, share: float = 1.0
) -> Resilient:
    """The application in ``place``; with ``limits`` two job limits on every account.

    ``sampled``: the share of root spans that the SDK keeps; ``share``: the share of runs that are traced (0 to 1).
    """
    two = [Limit(_ROOMY, per=60, counts="jobs"), Limit(_ROOMY, per=3600, counts="jobs")]
    return Resilient(
        place.url,
        schema=place.schema,
        upgrade=True,
        handlers=[noop, warm, down, stamp, get],
        limits={f"{ROOT}/*": two} if limits else None,
        breakers={DOWN: BreakerPolicy(streak=1, first_open=600)},  # one probe a run, however long it takes
        deps=deps,
        tracing=tracing_of(sampled, share),
    )


def account(n: int, resources: int) -> str:
    """The resource key of job ``n``."""
    return f"{ROOT}/acct-{n % resources}"


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
        context.Process(target=_member, args=(far, task, (n, *args) if numbered else args), daemon=True)
        for n, (_, far) in enumerate(pipes)
    ]
    running: list[SpawnProcess] = []
    try:
        for process in crew:
            process.start()
            running.append(process)
        near_ends = [near for near, _ in pipes]
        for _, far in pipes:
            far.close()
        _gather(near_ends)
        began = time.perf_counter()
        for pipe in near_ends:
            pipe.send("go")
        if meanwhile is not None:
            meanwhile()
        answers = _gather(near_ends)
        ended = max(answer.get("finished_at") or time.perf_counter() for answer in answers)
        return Crew(ended - began, answers)
    except BaseException:
        for process in running:
            process.kill()
        raise
    finally:
        for process in running:
            process.join()


def run_measured(server: Server, task: Callable[..., dict[str, Any]], processes: int, *args: Any) -> tuple[Crew, float]:
    """`run_crew` with numbered processes, and its and the server's CPU seconds from the common start on."""
    before: list[float | None] = []
    crew = run_crew(task, processes, *args, numbered=True, meanwhile=lambda: before.append(server.cpu()))
    return crew, server.total(crew.cpu, before[0])


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


# -- work -------------------------------------------------------------------------------------------------------------
#
# What a worker process of a bench does: an ordinary `worker.run()`, stopped when the jobs of all are done.
#
# How many are done stands in memory shared by the processes, one slot each, read a hundred times a second;
# asking the database would be part of the load.

_POLL: Final = 0.01  # seconds
_WARM_JOBS: Final = 500


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be worked off: ``jobs`` in ``place``, ``concurrency`` at once in each process.

    ``scraped``: with metrics and probes, which are asked every second, and a log as JSON. ``sampled``: with traces of
    this share of the jobs.
    """

    place: Scratch
    jobs: int
    concurrency: int
    limits: bool = False
    scraped: bool = False
    sampled: float = 0.0


def work(start: Start, number: int, done: MutableSequence[int], load: Load) -> dict[str, Any]:
    """Run until all results are written (a task of `run_crew`); ``done[number]`` is this process's share."""
    return run(_work(start, number, done, load))


async def _work(start: Start, number: int, done: MutableSequence[int], load: Load) -> dict[str, Any]:
    async with build(load.place, limits=load.limits, sampled=bool(load.sampled), share=load.sampled or 1.0) as app:
        await _warm_up(app, f"{WARM}-{number}", load.concurrency)
        worker = app.worker(concurrency=load.concurrency, except_kinds=[warm.kind])
        with ExitStack() as stack:
            begin_scraping = None
            if load.scraped:  # loaded and listening before the clock runs, as the rest of the worker is
                stack.enter_context(_json_log())
                begin_scraping = stack.enter_context(_scraping(app, worker))
            start()
            if begin_scraping is not None:
                begin_scraping()
            watching = asyncio.create_task(_watch(worker, number, done, load.jobs))
            await worker.run()
        return {"finished_at": await watching, "executions": worker.executions}


async def _warm_up(app: Resilient, key: str, concurrency: int) -> None:
    """Run some jobs of this process's own, so that its sessions are open and the server has planned its statements."""
    await app.enqueue_many(warm, [None] * _WARM_JOBS, resource_key=key)
    worker = app.worker(concurrency=concurrency, kinds=[warm.kind], resources=[key])
    running = asyncio.create_task(worker.run(signals=False))
    while worker.completer.written < _WARM_JOBS and not running.done():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(_POLL)
    worker.stop()
    await running


@contextmanager
def _json_log() -> Iterator[None]:
    """Write the log as ``--log json`` does, to nowhere; in a process that ends with the bench."""
    from resilient.surface.cli.logs import set_up  # noqa: PLC0415 - for one bench

    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        set_up("json", "info")
        yield


def tracing_of(sampled: float, share: float = 1.0) -> Tracing:
    """Spans as OpenTelemetry's SDK makes them, thrown away by their exporter; see `build`. Without ``sampled`` no SDK.

    Raises `MissingExtra` without the SDK.
    """
    if not sampled:
        return Tracing()
    try:
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - for one bench
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtra("the bench of traces needs OpenTelemetry's SDK: pip install opentelemetry-sdk") from error

    class Nowhere(SpanExporter):
        """Takes spans and throws them away."""

        def export(self, spans: Any) -> Any:  # noqa: ARG002
            """Say that it is done."""
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(sampled)))
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    return Tracing(provider, share=share)


@contextmanager
def _scraping(app: Resilient, worker: Worker) -> Iterator[Callable[[], None]]:
    """Serve metrics and probes; once its value is called, another process asks for all of them every second."""
    from resilient.surface.probes import Probes  # noqa: PLC0415 - for one bench

    probes = Probes(app, {"": (app, worker)})
    (server,) = probes.open(metrics="127.0.0.1:0", health="127.0.0.1:0")
    command = [sys.executable, "-m", "resilient.surface.bench.asker", f"http://127.0.0.1:{server.address[1]}"]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asker:  # noqa: S603 - ours
            pipes: Any = asker
            pipes.stdout.readline()  # it is loaded

            def begin() -> None:
                pipes.stdin.write(b"\n")
                pipes.stdin.flush()

            yield begin
            pipes.stdin.close()
    finally:
        probes.close()


async def _watch(worker: Worker, number: int, done: MutableSequence[int], jobs: int) -> float:
    """Stop the worker when all jobs are done; returns when that was (`time.perf_counter`)."""
    while True:
        done[number] = worker.completer.written
        if sum(done) >= jobs:
            break
        await asyncio.sleep(_POLL)
    finished = time.perf_counter()
    worker.stop()
    return finished


# -- figures ----------------------------------------------------------------------------------------------------------
#
# The figures of a bench: percentiles and rates, CPU seconds and memory of what it used.
#
# Used CPU is that of its worker processes and of the database, if that runs here: PostgreSQL's is the sum over the
# children of its first process plus what ended children left there. Other users of the same server count too: bench on
# a quiet one. None where /proc does not tell (another host, macOS).


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a ``share`` (0 to 1) of ``values`` does not exceed: always a measured one."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def milliseconds(values: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Median and 99th percentile of ``values`` (seconds), in milliseconds."""
    return {f"{prefix}p50_ms": _ms(percentile(values, 0.5)), f"{prefix}p99_ms": _ms(percentile(values, 0.99))}


def rate(count: int, seconds: float) -> float:
    """Things per second, to a tenth."""
    return round(count / seconds, 1)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


_TICK = os.sysconf("SC_CLK_TCK")
_MEGABYTE = 1 << (20 if sys.platform == "darwin" else 10)  # getrusage counts in kilobytes on Linux


def own_cpu() -> float:
    """User and system seconds of this process."""
    return time.process_time()  # `os.times` counts in hundredths: too coarse for an idle worker


def own_memory() -> float:
    """The most memory this process ever held, in megabytes."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _MEGABYTE, 1)


def postmaster(c: psycopg.Connection) -> int | None:
    """The process id of the server behind ``c``, if it runs on this machine."""
    row = c.execute("SELECT pg_backend_pid()").fetchone()
    with suppress(OSError, ValueError, TypeError):
        stat = _stat(int(row[0])) if row else []
        parent = int(stat[1])
        if Path(f"/proc/{parent}/comm").read_text().strip() in ("postgres", "postmaster"):
            return parent
    return None


def server_cpu(pid: int | None) -> float | None:
    """CPU seconds of the PostgreSQL server ``pid`` and its children, ended ones included."""
    if pid is None:
        return None
    total = 0.0
    try:
        total += sum(map(int, _stat(pid)[11:15])) / _TICK  # utime, stime, cutime, cstime
    except OSError:
        return None
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                if int(_stat(int(folder.name))[1]) == pid:
                    total += int((folder / "schedstat").read_text().split()[0]) / 1e9
    return total


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third (state) on; the second may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


# -- server -----------------------------------------------------------------------------------------------------------
#
# The database server of a bench, as far as its CPU time can be read.

_SETTLE: Final = 0.1  # seconds: for a moment an ended process counts neither as a child nor in its parent's sum


class Server:
    """Reads the CPU seconds of the PostgreSQL server, if it runs here; SQLite has none."""

    def __init__(self, place: Scratch) -> None:
        self._pid = None
        if not place.is_sqlite:
            import psycopg  # noqa: PLC0415 - needs the postgres extra

            with psycopg.connect(place.conninfo, autocommit=True) as c:
                self._pid = postmaster(c)

    def cpu(self) -> float | None:
        """CPU seconds so far; None where they cannot be read."""
        return server_cpu(self._pid)

    def total(self, workers: float, before: float | None) -> float:
        """The workers' CPU seconds and the server's since ``before``."""
        time.sleep(_SETTLE)
        now = self.cpu()
        used = now - before if now is not None and before is not None else 0.0
        return round(workers + used, 3)
