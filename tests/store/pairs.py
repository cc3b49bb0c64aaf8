"""Two or three transactions side by side on PostgreSQL: each is stopped before one of its statements, the last is not.

`Arena` holds one database with a `world` in it, put back before each meeting. Each act but the last runs in a
connection whose statements are counted: before the ``k``-th (or the commit) it stands still, unless it waits for a lock
before, which the server says. The last runs until it ends or waits. Then the first goes on, and the next. What one had
to give up for (`db/dialect.py`) is done once more, as the engine does. After that nothing may be broken, and
housekeeping finds nothing to repair.

Plans are those of an empty database, of a small one that was analysed, and of a large one. Its size is told to the
planner by hand (`pg_class`): so every meeting is quick, and the plans are those of half a million jobs.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import psycopg
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from resilient.store.db import tables, trouble
from resilient.store.db.database import Database
from resilient.store.db.dialect import is_lock_timeout
from tests import invariants
from tests.filling import fill
from tests.interleaving import PATIENCE, until_it_waits, waiters
from tests.store.registry import Act, Refused
from tests.store.world import NOW, build

PLANS = {"empty": 0, "small": 40, "large": 40}
MOST = 3  # that meet
WAITED = "waited"
COMMIT = 10_000  # stop before it: after every statement
_NAMES = [table.name for table in tables.metadata.sorted_tables]
_SIZE = (
    "UPDATE pg_class SET relpages = {pages}, reltuples = {rows}"
    " WHERE relname LIKE 'resilient%' AND relkind IN ('r', 'i')"
)


_WRITES = re.compile(r'(?:INSERT INTO|UPDATE|DELETE FROM) "?(resilient_[a-z_]+)')
_NAMES_A_TABLE = re.compile(r"resilient_[a-z_]+")


def writes(statement: str) -> set[str]:
    """The tables that a statement writes."""
    return set(_WRITES.findall(statement))


def names(statement: str) -> set[str]:
    """The tables that it reads or writes."""
    return set(_NAMES_A_TABLE.findall(statement)) & set(_NAMES)


class Meeting(NamedTuple):
    """How far each came before the next began, and what is wrong after all."""

    places: list[str]
    wrong: list[str]


class Stopper:
    """Stands in the way of one engine's statements."""

    def __init__(self, engine) -> None:
        self.count, self.stop_at, self.stands, self.go = 0, 0, threading.Event(), threading.Event()
        self.statements: list[str] = []
        self.place = ""
        event.listen(engine, "before_cursor_execute", self._before)
        event.listen(engine, "commit", self._commit)

    def arm(self, stop_at: int) -> None:
        """Stop before that statement, counted from 1; 0: never."""
        self.count, self.stop_at, self.statements = 0, stop_at, []
        self.stands.clear()
        self.go.clear()

    def _before(self, _c, _cursor, statement, _parameters, _context, _many):
        self.count += 1
        self.statements.append(statement)
        if self.count == self.stop_at:
            self._stand()

    def _commit(self, _c):
        if self.stop_at > self.count:
            self._stand()

    def _stand(self):
        self.place = "its commit" if self.stop_at > self.count else f"statement {self.stop_at}"
        self.stop_at = 0
        self.stands.set()
        assert self.go.wait(PATIENCE), "nobody let it go on"


class Arena:
    """A PostgreSQL database with a world in it."""

    def __init__(self, url: str, plans: str) -> None:
        self.plans = plans
        *self.actors, self.judge = (Database(url, clock=lambda: NOW) for _ in range(MOST + 1))
        self.watch = psycopg.connect(url, autocommit=True)
        self.stoppers = [Stopper(actor.sync_engine) for actor in self.actors]
        self.written = set(_NAMES)  # tables that are not as they were
        for database in (*self.actors, self.judge):
            event.listen(database.sync_engine, "before_cursor_execute", self._note)
        self.threads = ThreadPoolExecutor(MOST)
        self._alone: dict[str, list[str]] = {}
        self._prepare()

    def _prepare(self) -> None:
        fill(self.watch, PLANS[self.plans])
        self.judge.transaction_sync(build)
        invariants.install(self.watch)
        self.watch.execute("CREATE SCHEMA saved")
        for name in _NAMES:
            self.watch.execute(f"CREATE TABLE saved.{name} AS SELECT * FROM public.{name}".encode())
        name = self.watch.info.dbname
        self.watch.execute(f"ALTER DATABASE {name} SET deadlock_timeout = '50ms'".encode())
        if self.plans != "empty":
            self.watch.execute("ANALYZE")

    def _note(self, _c, _cursor, statement, _parameters, _context, _many):
        self.written.update(writes(statement))

    def put_back(self) -> None:
        """The world as it was."""
        back = "".join(f"INSERT INTO public.{n} SELECT * FROM saved.{n};" for n in sorted(self.written))
        pages, rows = (1, 50_000) if self.plans == "large" else (10, 200)
        size = "" if self.plans == "empty" else _SIZE.format(pages=pages, rows=rows)
        self.watch.execute(f"TRUNCATE {', '.join(['life', *self.written])}; {back} {size}".encode())
        self.written = {"resilient_job"}  # for the first line of each life

    def statements_of(self, act: Act) -> list[str]:
        """What an act sends, alone."""
        if act.name not in self._alone:
            self.put_back()
            stopper = self.stoppers[0]
            stopper.arm(0)
            self._do(self.actors[0], act.run)
            self._alone[act.name] = stopper.statements
        return self._alone[act.name]

    def meet(self, *acts: Act, stops: Sequence[int]) -> Meeting:
        """Let each act but the last run to its stop (a statement's number, or `COMMIT`), and then all of them on."""
        self.put_back()
        running, places = [], []
        for n, act in enumerate(acts):
            self.stoppers[n].arm(stops[n] if n < len(stops) else 0)
            others = waiters(self.watch) if n else None
            running.append(self.threads.submit(self._do, self.actors[n], act.run))
            places.append(self._until_it_rests(running[n], self.stoppers[n], others))
        for one, stopper in zip(running, self.stoppers, strict=False):
            others = waiters(self.watch)
            stopper.go.set()
            until_it_waits(self.watch, one, others)
        outcomes = [one.result(PATIENCE) for one in running]
        wrong = []
        for act, outcome in zip(acts, outcomes, strict=True):
            wrong += self._remarks(act, self._do(self.judge, act.again) if outcome is trouble else outcome)
        wrong += self.judged(replayed=any(act.replays for act in acts))
        story = ", ".join(f"{act.name} {place}" for act, place in zip(acts, places, strict=True))
        return Meeting(places, [f"{story} ({self.plans}): {one}" for one in wrong])

    def _until_it_rests(self, running: Future[object], stopper: Stopper, others: dict[int, list[int]] | None) -> str:
        """Until it stands, waits for a lock, or has ended; which. ``others`` wait already; None: it is alone."""
        deadline = time.monotonic() + PATIENCE
        while not running.done():
            if stopper.stands.wait(0.001):
                return f"stood before {stopper.place}"
            if others is not None and waiters(self.watch).keys() - others.keys():
                stopper.stop_at = 0
                return WAITED
            assert time.monotonic() < deadline, "it neither stands, waits nor ends"
        return "did not wait"

    @staticmethod
    def _remarks(act: Act, outcome: object) -> list[str]:
        if isinstance(outcome, BaseException):
            return [f"{act.name}: {type(outcome).__name__}: {str(outcome).splitlines()[0]}"]
        remark = act.check(outcome)
        return [] if remark is None else [f"{act.name}: {remark}"]

    def judged(self, *, replayed: bool) -> list[str]:
        """What is broken, what housekeeping repaired, and what is broken then."""
        wrong = invariants.broken(self.judge) + invariants.lives(self.judge, replayed=replayed)
        return wrong + invariants.keep_house(self.judge) + (invariants.broken(self.judge) if not wrong else [])

    @staticmethod
    def _do(database: Database, run) -> object:
        """What it gives, or the error it ends with; `lock_timeout` if it gave up waiting."""
        try:
            return database.transaction_sync(run)
        except DBAPIError as error:
            return trouble if is_lock_timeout(error) else error
        except Refused:
            return None
        except Exception as error:  # noqa: BLE001 - it is told
            return error

    def close(self) -> None:
        """Let go of everything."""
        self.threads.shutdown()
        self.watch.close()
        for database in (*self.actors, self.judge):
            database.close_sync()
