"""One run of the demo, from an empty database to the audit.

The provider and both workers are processes of their own; this one enqueues, watches, kills one worker with
SIGKILL while it has jobs running, and starts another.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from resilient.store.secrets import new_key
from resilient.surface.demo import contacts as files
from resilient.surface.demo import rows
from resilient.surface.demo.accounts import PROVIDER, plan
from resilient.surface.demo.audit import ON_THE_WIRE, Evidence, audit
from resilient.surface.demo.consent import connect
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
    from resilient.surface.demo.accounts import Plan
    from resilient.surface.demo.contacts import Contacts
    from resilient.surface.demo.screen import Screen
    from resilient.surface.demo.view import Snapshot
    from resilient.surface.scratch import Scratch

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
        crew = stack.enter_context(Crew(settings, folder))
        with screen(console, plain=options.plain) as display:
            _watch(app, crew, display, options, Owners(settings, troubles))
        crew.stop()
        if options.tamper is not None:
            options.tamper(log)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        found = audit(_evidence(app, entries, people, troubles, options))
        report(console, found, time.monotonic() - began)
        return found.passed


def _introduce(console: Console, people: Contacts, place: Scratch) -> None:
    where = "an SQLite file" if place.is_sqlite else "PostgreSQL, in a schema of its own"
    console.print(f"{len(people.good)} contacts from {people.source}, on {where}", soft_wrap=True, highlight=False)
    for problem in people.bad:
        console.print(f"left out: {people.source.name}, {problem}", soft_wrap=True, markup=False, highlight=False)


def _enqueued(settings: dict[str, Any], contacts: Contacts) -> Resilient:
    """The app, its tables made, every account connected: one job reads its records in, one pushes each contact out."""
    from resilient import Item  # noqa: PLC0415 - see below
    from resilient.surface.demo.app import build, push_contact  # noqa: PLC0415 - the whole engine: only when needed
    from resilient.surface.demo.people import read_people  # noqa: PLC0415 - the same

    app = build(settings)
    app.ready_sync()
    app.database.transaction_sync(rows.create)
    accounts = contacts.accounts
    connect(settings, accounts)
    reads = [Item({"account": account}, resource_key=f"{PROVIDER}/{account}") for account in accounts]
    app.enqueue_many_sync(read_people, reads, priority=1)
    app.enqueue_many_sync(push_contact, [Item(c, resource_key=c.resource_key) for c in contacts.good])
    return app


def _evidence(
    app: Resilient, log: list[dict[str, Any]], contacts: Contacts, troubles: Plan, options: Options
) -> Evidence:
    return Evidence(
        log=log,
        jobs=app.database.transaction_sync(all_jobs),
        contacts=[c.id for c in contacts.good],
        on_the_wire=options.on_the_wire,
        records=app.database.transaction_sync(rows.all_records),
        pushed=app.database.transaction_sync(rows.all_pushed),
        expected=[f"{account}-{n}" for account in contacts.accounts for n in range(troubles.people)],
    )


@dataclass(slots=True)
class Owners:
    """The accounts' owners: who is told that an account must be connected again does it, after a while."""

    settings: dict[str, Any]
    troubles: Plan
    told: dict[str, float] = field(default_factory=dict)  # account -> when

    def react(self, snapshot: Snapshot, say: Callable[[str], None]) -> None:
        """Connect again what has waited for its owner long enough."""
        now = time.monotonic()
        waiting = {key.split("/")[1] for key, found in snapshot.resources.items() if found.auth == "needs_reauth"}
        for account in sorted(waiting):
            if now - self.told.setdefault(account, now) >= self.troubles.consent_after:
                connect(self.settings, [account])
                say(f"the owner of {PROVIDER}/{account} connected it again; its jobs go on")
                waiting.discard(account)
        self.told = {account: when for account, when in self.told.items() if account in waiting}


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
