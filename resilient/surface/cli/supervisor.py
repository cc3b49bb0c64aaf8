"""``worker --processes N`` and ``--reload``: processes that are started, watched, started anew and stopped together.

Each process has a place, and each place a task that keeps it: it starts a process, waits for its end and starts the
next. One that ended by itself (--max-jobs, --max-memory, a signal to it alone) is followed at once; after one that
failed or was killed there is a pause that grows while that goes on. If the first process of a place ends with a usage
error (no such app, say), all are stopped, because the next would end so too; with --reload they wait for a correction.

A pair of sockets, the tether, joins this process and each of the others. There a process reports its health, and reads
what to do: `STOP` (finish what runs) or `NOW` (hand it back). The same order may also come as a signal to the whole
group, as a terminal and systemd send it; getting both is the same as getting one. If the tether's other end is gone, so
is the supervisor, however it ended: the process drains and ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from resilient.core.base.errors import InvalidInput, MissingExtra, SetupError
from resilient.core.base.loggers import logger
from resilient.core.base.phrases import counted
from resilient.core.jobs.backoff import retry_pause
from resilient.engine.ground.signals import SignalCount, stop_signals
from resilient.surface.cli.exits import FAILED, OK, USAGE
from resilient.surface.probes import BEAT, STILL, Address, Answer, Server, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.engine.run.worker import Worker
    from resilient.surface.probes import Probes

log = logger("worker")
STOP: Final = b"stop\n"
NOW: Final = b"now\n"
STEADY: Final = 60.0  # seconds: a process that lived longer did not fail at its start
APART: Final = 2.0  # seconds between two starts at a place, however its processes end
LONGEST: Final = 30.0  # seconds of a pause after failures
LONGEST_TEXT: Final = 2_000  # characters of a report, whose reader takes lines of 64 KiB
PATIENCE: Final = 30.0  # seconds from handing back to SIGKILL
_HIGHEST: Final = 65_535
_FIRST: Final = 2  # the pauses begin at 0.8 s
_SHOWN: Final = 3  # changed files


class Report(NamedTuple):
    """What a process says of itself, and when: empty texts are good news."""

    live: str
    ready: str
    at: float


class Place:
    """Where one process runs, and after it the next."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: asyncio.subprocess.Process | None = None
        self.report: Report | None = None
        self.has_been_ready = False
        self.renewed = asyncio.Event()  # its program has changed
        self._writer: asyncio.StreamWriter | None = None
        self._word = b""  # for a process that is being started
        self._runs, self._began = 0, 0.0

    async def run(self, command: Callable[[int, int], Sequence[str]]) -> int:
        """Run one process to its end; its exit status, negative if a signal ended it. Raises `OSError`."""
        self._word = b""
        self._runs, self._began = self._runs + 1, time.monotonic()
        near, far = socket.socketpair()
        with far:
            reader, self._writer = await asyncio.open_connection(sock=near)
            if self._word:
                self.tell(self._word)
            listening = asyncio.create_task(self._listen(reader))
            try:
                number = far.fileno()
                self.process = await asyncio.create_subprocess_exec(
                    *command(self.number, number), stdin=asyncio.subprocess.DEVNULL, pass_fds=[number], env=_environ()
                )
                far.close()
                log.info("process %d is pid %d", self.number, self.process.pid)
                return await self.process.wait()
            finally:
                listening.cancel()
                self._writer.close()
                self.process = self._writer = self.report = None

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            async for line in reader:
                with contextlib.suppress(ValueError):  # it was cut off
                    live, ready = json.loads(line)
                    self.report = Report(live, ready, time.monotonic())
                    self.has_been_ready |= not self.report.ready

    def tell(self, word: bytes) -> None:
        """Send the process a word; one that is being started reads it when it runs.

        It has `PATIENCE` for that: one that has never reported has run nothing, and is ended if it hangs.
        """
        self._word = word
        if self._writer is not None:
            self._writer.write(word)
            if self.report is None:
                asyncio.get_running_loop().call_later(PATIENCE, self._end_unheard, self._runs)

    def _end_unheard(self, run: int) -> None:
        if run == self._runs and self.report is None and self.process is not None:
            seconds = time.monotonic() - self._began
            log.error("process %d has said nothing for the %.0f s since its start: it is killed", self.number, seconds)
            self.kill()

    def kill(self) -> None:
        """End the process without asking it."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    @property
    def liveness_trouble(self) -> str:
        """Whether its event loop, or all of it, stands still; empty if it moves, or if nothing runs here.

        One that is being started counts from there.
        """
        if self.process is None:
            return ""
        silent = time.monotonic() - (self._began if self.report is None else self.report.at)
        trouble = "" if self.report is None else self.report.live
        return trouble or (f"has said nothing for {silent:.0f} s" if silent > STILL else "")

    @property
    def readiness_trouble(self) -> str:
        """Why it takes no jobs; empty if it does."""
        if self.process is None:
            return "is not running"
        return "is starting" if self.report is None else self.report.ready


class Supervisor:
    """Keeps processes until it is stopped. ``command`` gives the line for a place and the tether's descriptor."""

    def __init__(
        self,
        command: Callable[[int, int], Sequence[str]],
        processes: int,
        *,
        reload: bool = False,
        roll: Callable[[], float] = random.random,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if os.name != "posix":
            raise SetupError("--processes and --reload need a POSIX system; here, start several workers instead")
        if reload:
            _need_watchfiles()
        self._command, self._reload, self._roll = command, reload, roll
        self.places = [Place(number) for number in range(processes)]
        self._stopping, self._is_urgent, self._status = asyncio.Event(), False, OK
        self._signals = SignalCount(monotonic)

    async def run(self, *, health: str | None = None) -> int:
        """Keep the processes until one of `stop_signals`; the exit status."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._signalled)
        paths = {"/livez": self.livez, "/readyz": self.readyz}
        server = None if health is None else Server(Address.of("--health", health), paths)
        watching = asyncio.create_task(self._watch()) if self._reload else None
        try:
            async with asyncio.TaskGroup() as group:
                for place in self.places:
                    group.create_task(self._keep(place))
        finally:
            if watching is not None:
                watching.cancel()
            if server is not None:
                server.close()
        return self._status

    # -- one place ------------------------------------------------------------------------------------------------

    async def _keep(self, place: Place) -> None:
        failures = 0
        while not self._stopping.is_set():
            place.renewed.clear()
            began = time.monotonic()
            status = await self._start(place)
            lived = time.monotonic() - began
            if self._stopping.is_set():
                return
            if status == USAGE and not place.has_been_ready and not self._reload:
                self._status = status
                log.error("process %d ended with status %d: it cannot be started like this", place.number, status)
                self._stop()
                return
            failures = 0 if status == OK else 1 if lived > STEADY else failures + 1
            await self._pause(place, status, failures, lived)

    async def _start(self, place: Place) -> int:
        try:
            return await place.run(self._command)
        except OSError as error:
            log.error("process %d cannot be started: %s", place.number, error)  # noqa: TRY400 - the line says it all
            return FAILED

    async def _pause(self, place: Place, status: int, failures: int, lived: float) -> None:
        """Until the next start at this place: less if the program changes, or all is to end."""
        seconds: float | None = max(0.0, APART - lived)
        if place.renewed.is_set():
            return
        if self._reload and status > OK:
            log.error("process %d ended with status %d; it is started when a file changes", place.number, status)
            seconds = None
        elif status != OK:
            seconds = retry_pause(failures + _FIRST, self._roll(), LONGEST)
            log.error("process %d ended %s; the next is started in %.1f s", place.number, _how(status), seconds)
        waits = [asyncio.create_task(event.wait()) for event in (self._stopping, place.renewed)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()

    # -- all of them ----------------------------------------------------------------------------------------------

    def _signalled(self) -> None:
        if self._signals.next() == 0:
            return
        running = [place for place in self.places if place.process is not None]
        if not self._stopping.is_set():
            log.info("%s to drain", counted(len(running), "process is told", "processes are told"))
            self._stop()
        elif not self._is_urgent:
            self._is_urgent = True
            self._tell(NOW)
            asyncio.get_running_loop().call_later(PATIENCE, self._kill)
        else:
            self._kill()

    def _stop(self) -> None:
        self._stopping.set()
        self._tell(STOP)

    def _tell(self, word: bytes) -> None:
        for place in self.places:
            place.tell(word)

    def _kill(self) -> None:
        for place in self.places:
            place.kill()

    async def _watch(self) -> None:
        try:
            await self._follow_changes()
        except Exception as error:  # noqa: BLE001 - whatever it is: without it nothing would be started anew
            log.error("--reload: files cannot be watched, so all processes end: %s", error)  # noqa: TRY400 - see above
            self._status = FAILED
            self._stop()

    async def _follow_changes(self) -> None:
        from watchfiles import PythonFilter, awatch  # noqa: PLC0415 - an extra

        here = f"{Path.cwd()}{os.sep}"
        async for changes in awatch(here, watch_filter=PythonFilter(), stop_event=self._stopping):
            names = sorted({path.removeprefix(here) for _, path in changes})
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            log.info("changed: %s%s; the processes drain and start anew", ", ".join(names[:_SHOWN]), more)
            for place in self.places:
                place.renewed.set()
                place.tell(STOP)

    # -- health ---------------------------------------------------------------------------------------------------

    def livez(self) -> Answer:
        """Whether no process's event loop stands still."""
        return verdict({f"process {one.number}": text for one in self.places if (text := one.liveness_trouble)})

    def readyz(self) -> Answer:
        """Whether every process takes jobs."""
        if self._stopping.is_set():
            return verdict({"worker": "is draining"})
        troubles = {one.number: one.readiness_trouble.strip().replace("\n", "; ") for one in self.places}
        return verdict({f"process {number}": text for number, text in troubles.items() if text})


def endpoints(processes: int, metrics: str | None, health: str | None) -> list[list[str]]:
    """For each place the options of its own: process n serves its metrics at the port plus n.

    Raises `InvalidInput` if ports overlap or exceed 65,535.
    """
    if metrics is None:
        return [[] for _ in range(processes)]
    first = Address.of("--metrics", metrics).port
    ports = range(first, first + processes) if first else range(0)
    if first + processes - 1 > _HIGHEST:
        raise InvalidInput(f"--metrics {metrics}: {processes} processes need ports up to {ports[-1]}; say a lower one")
    if health is not None and (port := Address.of("--health", health).port) in ports:
        raise InvalidInput(
            f"--health {health}: the metrics of {counted(processes, 'process', 'processes')} take the ports {first} to"
            f" {ports[-1]}, and {port} is one of them; say another"
        )
    host, colon, _ = metrics.rpartition(":")
    return [["--metrics", f"{host}{colon}{first + n if first else 0}"] for n in range(processes)]


def _how(status: int) -> str:
    """How a process ended that failed; signals for the program's own use (real-time ones) have no name."""
    if status > OK:
        return f"with status {status}"
    names = {one.value: one.name for one in signal.Signals}
    return f"by {names.get(-status, f'signal {-status}')}"


def _need_watchfiles() -> None:
    try:
        import watchfiles  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise MissingExtra("--reload needs watchfiles: pip install 'resilient-engine[reload]'") from error


def _environ() -> dict[str, str] | None:
    """A program that was started as a script (`manage.py`) finds its modules beside it: so shall its processes."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or script.name == "__main__.py":
        return None
    paths = [str(script.parent.resolve()), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Tether:
    """A process's end of the pair: reports how it is, and does what it is told. It lives in a thread of its own."""

    def __init__(self, descriptor: int, worker: Worker, probes: Probes) -> None:
        self._worker, self._probes = worker, probes
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.settimeout(BEAT)
        probes.beat()
        self._thread = threading.Thread(target=self._run, name="resilient-tether", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report nothing more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        words = {STOP.strip(): self._worker.stop, NOW.strip(): self._worker.hand_back}
        while True:
            try:
                self._report()
                data = self._socket.recv(100)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            for word in data.split():
                self._on_loop(words[word])
            if not data:  # whoever kept this process is gone
                self._on_loop(self._worker.stop)
                return

    def _report(self) -> None:
        answers = (self._probes.livez(), self._probes.readyz())
        texts = ["" if one.status == HTTPStatus.OK else one.text.decode().strip()[:LONGEST_TEXT] for one in answers]
        self._socket.sendall(json.dumps(texts).encode() + b"\n")

    def _on_loop(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action)


__all__ = ["Place", "Report", "Supervisor", "Tether", "endpoints"]
