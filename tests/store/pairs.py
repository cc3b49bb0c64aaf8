"""Two transactions side by side on PostgreSQL: the first is stopped before one of its statements, the second begins.

`Arena` holds one database with a `world` in it, put back before each meeting. The first act runs in a connection whose
statements are counted: before the ``k``-th (or the commit) it stands still. The second runs until it ends or waits for
a lock, which the server says. Then the first goes on, and the second. What either had to give up for (`patience.py`) is
done once more, as the engine does. After that nothing may be broken, and housekeeping finds nothing to repair.

Plans are those of an empty database, of a small one that was analysed, and of a large one. Its size is told to the
planner by hand (`pg_class`): so every meeting is quick, and the plans are those of half a million jobs.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from resilient.store import patience, tables
from resilient.store.database import Database
from tests import invariants
from tests.filling import fill
from tests.interleaving import PATIENCE, until_it_waits
from tests.store.registry import Act, Refused
from tests.store.world import NOW, build

PLANS = {"empty": 0, "small": 40, "large": 40}
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


class Stopper:
    """Stands in the way of one engine's statements."""

    def __init__(self, engine) -> None:
        self.count, self.stop_at, self.stands, self.go = 0, 0, threading.Event(), threading.Event()
        self.statements: list[str] = []
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
        self.stop_at = 0
        self.stands.set()
        assert self.go.wait(PATIENCE), "nobody let it go on"


class Arena:
    """A PostgreSQL database with a world in it."""

    def __init__(self, url: str, plans: str) -> None:
        self.plans = plans
        self.first, self.second, self.judge = (Database(url, clock=lambda: NOW) for _ in range(3))
        self.watch = psycopg.connect(url, autocommit=True)
        self.stopper = Stopper(self.first.sync_engine)
        self.written = set(_NAMES)  # tables that are not as they were
        for database in (self.first, self.second, self.judge):
            event.listen(database.sync_engine, "before_cursor_execute", self._note)
        self.threads = ThreadPoolExecutor(2)
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
            self.stopper.arm(0)
            self._do(self.first, act.run)
            self._alone[act.name] = self.stopper.statements
        return self._alone[act.name]

    def meet(self, first: Act, second: Act, stop_at: int) -> list[str]:
        """What is wrong after a meeting."""
        self.put_back()
        self.stopper.arm(stop_at)
        one = self.threads.submit(self._do, self.first, first.run)
        while not self.stopper.stands.wait(0.001) and not one.done():
            pass
        two = self.threads.submit(self._do, self.second, second.run)
        waited = until_it_waits(self.watch, two)
        self.stopper.go.set()
        outcomes = [one.result(PATIENCE), two.result(PATIENCE)]
        wrong = []
        for act, outcome in zip((first, second), outcomes, strict=True):
            wrong += self._remarks(act, self._do(self.judge, act.again) if outcome is patience else outcome)
        wrong += self.judged(replayed=first.replays or second.replays)
        where = "its commit" if stop_at == COMMIT else f"statement {stop_at}"
        how = "waited" if waited else "did not wait"
        return [f"{first.name} stood before {where}, {second.name} {how} ({self.plans}): {one}" for one in wrong]

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
        """What it gives, or the error it ends with; `patience` if it gave up waiting."""
        try:
            return database.transaction_sync(run)
        except DBAPIError as error:
            return patience if patience.was_held_up(error) else error
        except Refused:
            return None
        except Exception as error:  # noqa: BLE001 - it is told
            return error

    def close(self) -> None:
        """Let go of everything."""
        self.threads.shutdown()
        self.watch.close()
        for database in (self.first, self.second, self.judge):
            database.close_sync()
