"""Everything at once: workers killed and stopped, sessions cut, a provider that fails, producers that roll back.

A seed decides what happens when; it stands in every failure. RESILIENT_CHAOS_SECONDS (default 15) is how long it lasts,
RESILIENT_CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import history
import psycopg
import pytest
from harness import Eye, address, new, states, unfinished, wait
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from resilient import DatabaseUnreachable, Kind, Resilient
from resilient.store.db.database import Database
from resilient.store.jobs import insert as jobs

pytestmark = pytest.mark.proof("the simulation: hundreds of runs, each with its own faults")

SECONDS = float(os.environ.get("RESILIENT_CHAOS_SECONDS", "15"))
SEED = int(os.environ.get("RESILIENT_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
LEASE = 1.0
WORKERS = 3
MOST, PER = 24, 2.0  # requests of an account
CAP = 3  # jobs of p/3 at once
LATE = 4  # requests a worker may have had between its last look at the gate and the line when it was stopped
ACCOUNTS = 4
STEP, UNDO = Kind("step"), Kind("undo")
RUNNING_OF = (
    "SELECT j.id FROM resilient_job j JOIN resilient_worker w ON w.id = j.locked_by"
    " WHERE j.state = 'running' AND w.pid ="
)
OPEN_WORKFLOWS = "SELECT id FROM resilient_workflow WHERE finished_at IS NULL"


class Producers:
    """Two threads that enqueue; some of their transactions roll back, some lose their session."""

    def __init__(self, database, rng):
        self.database = Database(database.url, connections=2)
        self.committed, self.rolled_back, self.unknown = [], [], []
        self._n = 0
        self._app = Resilient(self.database, kinds=[STEP, UNDO], upgrade=False)
        self.workflows = 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(rng.random()),)) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _run(self, rng):
        while not self._closed.wait(rng.uniform(0.15, 0.4)):
            if rng.random() < 0.3:
                self._begin(rng, rolls_back=rng.random() < 0.2)
            self._enqueue([self._job(rng) for _ in range(rng.choice((1, 1, 2, 8)))], rolls_back=rng.random() < 0.2)

    def _job(self, rng):
        with self._lock:
            self._n += 1
            n = self._n
        kind = rng.choices(("work", "thread", "fails"), (8, 1, 1))[0]
        return new(
            kind,
            f"p/{rng.randrange(ACCOUNTS)}",
            {"n": n},
            max_attempts=3 if kind == "fails" else None,
            priority=rng.choice((0, 0, 0, 5)),
            delay=rng.choice((None, None, None, rng.uniform(0, 2))),
        )

    def _begin(self, rng, *, rolls_back):
        """A workflow: two steps side by side, one after both, some with an undo; one in three fails somewhere."""
        fails = rng.randrange(12)
        made = [{"fails": n == fails} for n in range(4)]
        ids = []
        try:
            with Session(self.database.sync_engine) as session:
                with self._app.sync.workflow("chaos", session=session, resource_key="flow") as wf:
                    a, b = (wf.step(STEP, made[n], name=f"s{n}", undo=UNDO) for n in (0, 1))
                    c = wf.step(STEP, made[2], name="s2", after=[a, b], undo=UNDO, resource_key="flow/2")
                    wf.step(STEP, made[3], name="s3", after=c)
                    ids = [one.id.hex for one in wf.steps]
                (session.rollback if rolls_back else session.commit)()
            (self.rolled_back if rolls_back else self.committed).extend(ids)
            self.workflows += not rolls_back
        except (SQLAlchemyError, DatabaseUnreachable):
            (self.rolled_back if rolls_back else self.unknown).extend(ids)

    def _enqueue(self, batch, *, rolls_back):
        ids = [job.id.hex for job in batch]
        try:
            with self.database.sync_engine.connect() as c:
                c.begin()
                jobs.insert(c, self.database.dialect, batch)
                (c.rollback if rolls_back else c.commit)()
            (self.rolled_back if rolls_back else self.committed).extend(ids)
        except SQLAlchemyError:
            (self.rolled_back if rolls_back else self.unknown).extend(ids)

    def close(self):
        self._closed.set()
        for thread in self._threads:
            thread.join()
        # Whoever lost the answer to a commit asks: either it is there and must be done, or it never was.
        found = {str(row.id).replace("-", "") for row in history.rows(self.database, "SELECT id FROM resilient_job")}
        self.database.close_sync()
        self.committed += [id_ for id_ in self.unknown if id_ in found]
        self.rolled_back += [id_ for id_ in self.unknown if id_ not in found]


class Nemesis:
    """What goes wrong."""

    def __init__(self, database, crew, provider, rng):
        self.database, self.crew, self.provider, self.rng = database, crew, provider, rng
        self.deeds, self.stopped = [], {}
        self.options = (
            *("--provider", provider.url, "--lease", str(LEASE), "--limit", f"{MOST}/{PER:g}s"),
            *("--cap", f"p/3={CAP}", "--first-open", "0.5", "--slow", "0.15"),
        )

    def hire(self):
        while len(self.crew.alive()) < WORKERS:
            self.crew.start(self.database, *self.options)

    def run(self, seconds, is_enough):
        """Harm for so many seconds, and for as long as it is not enough: a machine may be slow."""
        began = time.monotonic()
        for account in range(
            ACCOUNTS
        ):  # for certain: how many jobs meet a limit or an open circuit is the machine's luck
            self.provider.throttle(str(account), 2)
        self.kill_at_work()
        self.hire()
        while time.monotonic() < began + seconds or not is_enough():
            deed = self.rng.choices((self.kill, self.stop, self.cut, self.burst), (2, 2, 4, 1))[0]
            deed()
            self.deeds.append(deed.__name__)
            until = time.monotonic() + self.rng.uniform(0.1, 1.5)
            while time.monotonic() < until:
                self.wake()
                time.sleep(0.02)
            self.hire()
        self.wake(all_=True)

    def kill_at_work(self):
        """One that holds a job: it stands still meanwhile, so that the job is still its own when it dies."""

        def strike():
            for child in self.crew.alive():
                child.send_signal(signal.SIGSTOP)
                if history.rows(self.database, f"{RUNNING_OF} {child.pid}"):
                    child.kill()
                    child.wait()
                    return True
                child.send_signal(signal.SIGCONT)
            return False

        wait(strike, 60)

    def kill(self):
        child = self.rng.choice(self.crew.alive())
        self.stopped.pop(child, None)
        child.kill()
        child.wait()

    def stop(self):
        child = self.rng.choice(self.crew.alive())
        child.send_signal(signal.SIGSTOP)
        self.stopped[child] = time.monotonic() + self.rng.uniform(1, 3) * LEASE

    def wake(self, *, all_=False):
        for child, until in list(self.stopped.items()):
            if all_ or time.monotonic() >= until:
                del self.stopped[child]
                child.send_signal(signal.SIGCONT)

    def cut(self):
        """One session, or all of them; most are in the middle of something."""
        one = "" if self.rng.random() < 0.3 else "ORDER BY state = 'idle', random() LIMIT 1"
        with psycopg.connect(address(self.database), autocommit=True) as c:
            c.execute(
                "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                f" AND datname = current_database() {one}) AS victims"
            )

    def burst(self):
        self.provider.down(self.rng.uniform(0.5, 2.0))


@pytest.mark.chaos
def test_nothing_is_lost_whatever_happens(postgres, crew, provider):
    print(f"RESILIENT_CHAOS_SEED={SEED} RESILIENT_CHAOS_SECONDS={SECONDS:g}")  # noqa: T201
    rng = random.Random(SEED)
    nemesis, eye, producers = Nemesis(postgres, crew, provider, rng), Eye(postgres), Producers(postgres, rng)
    nemesis.hire()
    nemesis.run(SECONDS, lambda: _happened(postgres, producers, eye))
    producers.close()
    healed = time.monotonic()
    # What was left over is a matter of the machine's speed: twenty busy processes on two cores took a minute.
    wait(lambda: _nothing_left(postgres), 180, about=lambda: f"seed {SEED}: {unfinished(postgres)} left\n{crew.said()}")
    healing = time.monotonic() - healed
    crew.stop()
    seen, arrivals = eye.close(), provider.arrivals()
    broken = history.check(postgres, crew.log, committed=producers.committed, rolled_back=producers.rolled_back)
    broken += history.circuits(postgres) + history.delivered(postgres, arrivals) + seen + crew.stranded()
    broken += history.workflows(postgres)
    broken += history.capped(postgres, "p/3", CAP) + history.within(arrivals, MOST + LATE, PER - 0.5)
    deferred = sum(row.deferrals > 0 for row in states(postgres).values())
    rescued = sum(row.rescues > 0 for row in states(postgres).values())
    facts = f"seed {SEED}: {len(producers.committed)} jobs, {len(arrivals)} requests, {deferred} deferred"
    print(  # noqa: T201
        facts, f"{rescued} rescued, healed in {healing:.1f} s, {len(producers.unknown)} unknown commits,", nemesis.deeds
    )
    assert broken == [], facts


def _happened(database, producers, eye):
    """Whether everything that may happen has, some times."""
    if len(producers.committed) <= 4 * SECONDS or producers.workflows <= SECONDS / 5 or eye.looks <= SECONDS:
        return False
    try:
        rows = states(database).values()
    except (DatabaseUnreachable, SQLAlchemyError):
        return False
    met = any(row.deferrals > 0 for row in rows) and any(row.rescues > 0 for row in rows)
    return met and bool(producers.rolled_back)


def _nothing_left(database):
    try:
        return not unfinished(database) and not history.rows(database, OPEN_WORKFLOWS)
    except (DatabaseUnreachable, SQLAlchemyError):
        return False
