"""One run of the demo, from an empty database to the audit.

The provider and both workers are processes of their own; this one enqueues, watches, kills one worker with SIGKILL
while it has jobs running, and starts another. The others end with this one: each reads a pipe that closes when its
parent dies. Only what was started here is ever killed.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from resilient import Item
from resilient.core.base.errors import SetupError
from resilient.store.accounts.secrets import new_key
from resilient.surface.demo import accounts as files
from resilient.surface.demo.accounts import PROVIDER, plan
from resilient.surface.demo.app import all_pushed, all_records, build, connect, create, push_contact, read_people
from resilient.surface.demo.audit import ON_THE_WIRE, Evidence, audit
from resilient.surface.demo.screen import all_jobs, happened, look, report, screen
from resilient.surface.scratch import scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

    from resilient import Resilient
    from resilient.surface.demo.accounts import Contacts, Plan
    from resilient.surface.demo.screen import Screen, Snapshot
    from resilient.surface.scratch import Scratch


_PATIENCE: Final = 10.0  # seconds for a process to stop
_TAIL: Final = 15  # lines of a dead worker's log that are shown


@contextmanager
def running_provider(log: Path, troubles: Mapping[str, Any], secret: str) -> Iterator[dict[str, str]]:
    """The provider's process; yields its addresses, ``steady`` and ``fragile``, and that of the webhook, ``sink``."""
    arguments = ("--log", str(log), "--plan", json.dumps(troubles), "--secret", secret)
    process = _start("provider", *arguments, stdout=subprocess.PIPE)
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
        """Begin without a worker."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all workers."""
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
        """Raise `SetupError`, with the end of its log, if a worker ended that this process did not kill."""
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


_LOOK: Final = 0.2  # seconds between two looks at the database
_KILL_AT: Final = 0.3  # share of the jobs done when a worker is killed


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. ``tamper`` sees the provider's log before the audit does (for tests).

    ``on_the_wire``: see `audit`; a machine on which processes wait a second for their turn needs more.
    """

    csv: Path | None = None
    database: str | None = None
    workers: int = 2
    plain: bool = False
    dashboard: bool = False
    limit: float = 120.0  # seconds without a job that ends, after which the run is judged as it stands
    on_the_wire: float = ON_THE_WIRE
    trouble: dict[str, Any] = field(default_factory=dict)  # changes of the `Plan`
    tamper: Callable[[Path], None] | None = None


def run(options: Options, console: Console) -> bool:
    """Run the demo; whether every claim holds. Raises `SetupError` for what cannot be started."""
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resilient-demo-")))
        people = files.read(files.find(options.csv, folder))
        place = stack.enter_context(scratch(options.database, "demo"))
        _introduce(console, people, place)
        log = folder / "provider.jsonl"
        troubles = plan(((c.account, c.endpoint) for c in people.good), **options.trouble)
        secret = "whsec_" + base64.b64encode(os.urandom(32)).decode()
        addresses = stack.enter_context(running_provider(log, troubles.to_json(), secret))
        settings = {
            "url": place.url, "schema": place.schema, "addresses": addresses, "secrets": [new_key()],
            "webhook_secret": secret,
        }  # fmt: skip
        app = _enqueued(settings, people)
        stack.callback(app.database.close_sync)
        if options.dashboard:
            _open_dashboard(settings, stack, console)
        crew = stack.enter_context(Crew(settings, folder))
        with screen(console, plain=options.plain) as display:
            _watch(app, crew, display, options, Owners(settings, troubles))
        crew.stop()
        if options.tamper is not None:
            options.tamper(log)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        verdict = audit(_evidence(app, entries, people, troubles, options))
        report(console, verdict, time.monotonic() - began)
        if options.dashboard:
            _stay(console)
        return verdict.passed


def _open_dashboard(settings: dict[str, Any], stack: ExitStack, console: Console) -> None:
    from resilient.surface.web.dashboard.alone import in_background  # noqa: PLC0415 - an extra

    address = stack.enter_context(in_background(build(settings)))
    console.print(f"Dashboard: {address}", soft_wrap=True, highlight=False)


def _stay(console: Console) -> None:
    console.print("The dashboard stays until Ctrl-C.", highlight=False)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def _introduce(console: Console, people: Contacts, place: Scratch) -> None:
    where = "an SQLite file" if place.is_sqlite else "PostgreSQL, in a schema of its own"
    console.print(f"{len(people.good)} contacts from {people.source}, on {where}", soft_wrap=True, highlight=False)
    for problem in people.bad:
        console.print(f"left out: {people.source.name}, {problem}", soft_wrap=True, markup=False, highlight=False)


def _enqueued(settings: dict[str, Any], contacts: Contacts) -> Resilient:
    """The app, its tables made, every account connected: one job reads its records in, one pushes each contact out."""
    app = build(settings)
    app.ready_sync()
    app.database.transaction_sync(create)
    accounts = contacts.accounts
    connect(settings, accounts)
    reads = [Item({"account": account}, resource_key=f"{PROVIDER}/{account}") for account in contacts.read_in]
    app.enqueue_many_sync(read_people, reads, priority=1)
    app.enqueue_many_sync(push_contact, [Item(c, resource_key=c.resource_key) for c in contacts.good])
    return app


def _evidence(
    app: Resilient, log: list[dict[str, Any]], contacts: Contacts, troubles: Plan, options: Options
) -> Evidence:
    gates = app.database.transaction_sync(look).resources
    undeclared = files.resource_key(files.UNDECLARED, files.ENDPOINT)
    return Evidence(
        log=log,
        jobs=app.database.transaction_sync(all_jobs),
        contacts=[c.id for c in contacts.good],
        on_the_wire=options.on_the_wire,
        records=app.database.transaction_sync(all_records),
        pushed=app.database.transaction_sync(all_pushed),
        learnt=gates[undeclared].rate if undeclared in gates else None,
        allowed=troubles.allowed,
        expected=[f"{account}-{n}" for account in contacts.read_in for n in range(troubles.people)],
    )


@dataclass(slots=True)
class Owners:
    """The accounts' owners: each connects his account again, a while after he was notified."""

    settings: dict[str, Any]
    troubles: Plan
    notified: dict[str, float] = field(default_factory=dict)  # account -> when

    def react(self, snapshot: Snapshot, say: Callable[[str], None]) -> None:
        """Connect again what has waited for its owner long enough."""
        now = time.monotonic()
        waiting = {key.split("/")[1] for key, resource in snapshot.resources.items() if resource.auth == "needs_reauth"}
        for account in sorted(waiting):
            if now - self.notified.setdefault(account, now) >= self.troubles.consent_after:
                connect(self.settings, [account])
                say(f"the owner of {PROVIDER}/{account} connected it again; its jobs go on")
                waiting.discard(account)
        self.notified = {account: when for account, when in self.notified.items() if account in waiting}


def _watch(app: Resilient, crew: Crew, display: Screen, options: Options, owners: Owners) -> None:
    """Show the run until every job is finished; kill one worker on the way."""
    for _ in range(options.workers):
        display.say(f"{crew.hire()} started")
    done, since = 0, time.monotonic()
    last: Snapshot | None = None
    killed = False
    while time.monotonic() < since + options.limit:
        snapshot = app.database.transaction_sync(look)
        if snapshot.finished > done:  # a slow machine takes longer, and loses nothing
            done, since = snapshot.finished, time.monotonic()
        for line in happened(last, snapshot) if last is not None else ():
            display.say(line)
        display.show(snapshot)
        owners.react(snapshot, display.say)
        if snapshot.finished == snapshot.jobs:
            return
        if not killed and snapshot.finished >= snapshot.jobs * _KILL_AT:
            running = {int(worker.split(":")[-2]): n for worker, n in snapshot.running.items()}
            if (killing := crew.kill_if_busy(running)) is not None:
                killed = True
                display.say(killing)
                display.say(f"{crew.hire()} started in its place")
        crew.check()
        last = snapshot
        time.sleep(_LOOK)
    display.say(f"not finished, and no job has ended for {options.limit:.0f} s; judged as it stands")
