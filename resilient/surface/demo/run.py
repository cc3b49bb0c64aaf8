"""One run of the demo, from an empty database to the audit.

The provider and both workers are processes of their own; this one enqueues, watches, kills one worker with
SIGKILL while it has jobs running, and starts another.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.demo import contacts as files
from resilient.surface.demo.accounts import plan
from resilient.surface.demo.audit import audit
from resilient.surface.demo.events import happened
from resilient.surface.demo.processes import Crew, running_provider
from resilient.surface.demo.report import report
from resilient.surface.demo.screen import screen
from resilient.surface.demo.view import all_jobs, look
from resilient.surface.scratch import scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from resilient import Resilient
    from resilient.surface.demo.contacts import Contacts
    from resilient.surface.demo.screen import Screen
    from resilient.surface.demo.view import Snapshot
    from resilient.surface.scratch import Scratch

_LOOK: Final = 0.2  # seconds between two looks at the database
_KILL_AT: Final = 0.3  # share of the jobs done when a worker is killed


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. ``tamper`` sees the provider's log before the audit does (for tests)."""

    csv: Path | None = None
    database: str | None = None
    workers: int = 2
    plain: bool = False
    limit: float = 120.0  # seconds after which the run is judged as it stands
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
        addresses = stack.enter_context(running_provider(log, troubles.to_json()))
        app = _enqueued(place, addresses, people)
        stack.callback(app.database.close_sync)
        settings = {"url": place.url, "schema": place.schema, "addresses": addresses}
        crew = stack.enter_context(Crew(settings, folder))
        with screen(console, plain=options.plain) as display:
            _watch(app, crew, display, options)
        crew.stop()
        if options.tamper is not None:
            options.tamper(log)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        found = audit(entries, app.database.transaction_sync(all_jobs), [c.id for c in people.good])
        report(console, found, time.monotonic() - began)
        return found.passed


def _introduce(console: Console, people: Contacts, place: Scratch) -> None:
    where = "an SQLite file" if place.is_sqlite else "PostgreSQL, in a schema of its own"
    console.print(f"{len(people.good)} contacts from {people.source}, on {where}", soft_wrap=True, highlight=False)
    for problem in people.bad:
        console.print(f"left out: {people.source.name}, {problem}", soft_wrap=True, markup=False, highlight=False)


def _enqueued(place: Scratch, addresses: dict[str, str], people: Contacts) -> Resilient:
    """The app, its tables made, with one job per contact."""
    from resilient import Item  # noqa: PLC0415 - see below
    from resilient.surface.demo.app import build, push_contact  # noqa: PLC0415 - the whole engine: only when needed

    app = build(place.url, place.schema, addresses)
    app.enqueue_many_sync(push_contact, [Item(c, resource_key=c.resource_key) for c in people.good])
    return app


def _watch(app: Resilient, crew: Crew, display: Screen, options: Options) -> None:
    """Show the run until every job is finished; kill one worker on the way."""
    for _ in range(options.workers):
        display.say(f"{crew.hire()} started")
    deadline = time.monotonic() + options.limit
    last: Snapshot | None = None
    killed = False
    while time.monotonic() < deadline:
        snapshot = app.database.transaction_sync(look)
        for line in happened(last, snapshot) if last is not None else ():
            display.say(line)
        display.show(snapshot)
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
    display.say(f"not finished after {options.limit:.0f} s; judged as it stands")
