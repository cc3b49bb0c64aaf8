"""Order under chaos: workers killed, stopped beyond their leases and cut off, producers that roll back, jobs that fail.

The checker knows three rules, and would notice engines with one part removed (`mutants.py`). O1: the numbers of a lane
are gapless. O2: the first execution of a job starts after an execution of the one before it in its lane has ended.
O3: a transaction that began after another was committed gets larger numbers in every lane that they share.
RESILIENT_CHAOS_SECONDS (default 8) is how long it lasts, RESILIENT_CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time

import harness
import history
import psycopg
import pytest
from harness import address, wait
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from resilient import DatabaseUnreachable, Kind, Resilient
from resilient.store.db.database import Database
from resilient.store.jobs import insert, order

pytestmark = pytest.mark.proof("tests/engine/test_order.py, and order in the simulation")

SECONDS = float(os.environ.get("RESILIENT_CHAOS_SECONDS", "8"))
SEED = int(os.environ.get("RESILIENT_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
LANES, WORKERS, LEASE = 6, 3, 1.0
ORDERED = Kind("ordered")


class Publishers:
    """Threads that enqueue into shared lanes; some transactions roll back, some lose their sessions."""

    def __init__(self, database, rng, count=3):
        self.app = Resilient(Database(database.url, connections=count + 4), kinds=[ORDERED], upgrade=False)
        self.commits = []  # (began, ended, ids), of commits that were answered
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(rng.random()),)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, rng):
        while not self._closed.wait(rng.uniform(0.02, 0.15)):
            began = time.monotonic()
            try:
                with Session(self.app.database.sync_engine) as session:
                    ids = [self._publish(session, rng) for _ in range(rng.choice((1, 1, 2, 5)))]
                    if rng.random() < 0.15:
                        session.rollback()
                        continue
                    time.sleep(rng.uniform(0, 0.03))  # a business transaction takes its time
                    session.commit()
            except SQLAlchemyError:
                continue
            self.commits.append((began, time.monotonic(), ids))

    def _publish(self, session, rng):
        fails = rng.choices((0, 1, 2), (8, 1, 1))[0]
        key = f"k{rng.randrange(LANES)}"
        return self.app.enqueue_sync(
            ORDERED, {"fails": fails}, resource_key="p/0", ordering_key=key, session=session
        ).id.hex

    def close(self):
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self.app.database.close_sync()


def lanes(database):
    """Each lane's jobs in their order: (number, id)."""
    found = {}
    for row in history.rows(database, "SELECT ordering_key, order_no, id FROM resilient_job ORDER BY 1, 2"):
        found.setdefault(row.ordering_key, []).append((row.order_no, str(row.id).replace("-", "")))
    return found


def broken(database, log, commits=()):
    """The rules that were broken."""
    found, numbers = [], {}
    first, ended, never = *marks(log), len(history.read(log))
    for key, jobs in lanes(database).items():
        if [no for no, _ in jobs] != list(range(1, len(jobs) + 1)):
            found.append(f"O1 {key}: {[no for no, _ in jobs][:50]}")
        numbers |= {id_: (key, no) for no, id_ in jobs}
        for (no, one), (_, other) in itertools.pairwise(jobs):
            if other in first and first[other] < ended.get(one, never):
                found.append(f"O2 {key}: number {no + 1} started before number {no} had ended")
    return found + inverted(numbers, commits)


def marks(log):
    """Where in the log each job first starts, and first ends."""
    first, ended = {}, {}
    for place, event in enumerate(history.read(log)):
        if event["event"] in ("start", "end"):
            (first if event["event"] == "start" else ended).setdefault(event["job"], place)
    return first, ended


def inverted(numbers, commits):
    """Numbers that are larger than those of a later transaction."""
    found = []
    for began, _, ids in commits:
        mine = [numbers[id_] for id_ in ids if id_ in numbers]
        before = [numbers[id_] for _, ended, others in commits if ended < began for id_ in others if id_ in numbers]
        highest = {key: max(no for q, no in before if q == key) for key in {key for key, _ in before}}
        found += [
            f"O3 {key}: {highest[key]} was committed before {no} began" for key, no in mine if highest.get(key, 0) > no
        ]
    return found


def disturb(database, crew, rng, seconds):
    """Kill, stop and cut, in the order that the seed says."""
    until, stopped = time.monotonic() + seconds, {}
    options = ("--lease", str(LEASE), "--slow", "0.05")
    while time.monotonic() < until:
        while len(crew.alive()) < WORKERS:
            crew.start(database, *options)
        time.sleep(rng.uniform(0.2, 0.8))
        for child, at in list(stopped.items()):
            if time.monotonic() >= at:
                child.send_signal(signal.SIGCONT)
                del stopped[child]
        deed, child = rng.choice(("kill", "stop", "cut")), rng.choice(crew.alive())
        if deed == "kill":
            stopped.pop(child, None)
            child.kill()
            child.wait()
        elif deed == "stop":
            child.send_signal(signal.SIGSTOP)
            stopped[child] = time.monotonic() + rng.uniform(1.2, 2.5) * LEASE
        else:
            with psycopg.connect(address(database), autocommit=True) as c:
                c.execute(
                    "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity WHERE datname ="
                    " current_database() AND pid <> pg_backend_pid() ORDER BY state = 'idle', random() LIMIT 2) AS v"
                )
    for child in stopped:
        child.send_signal(signal.SIGCONT)


def nothing_left(database):
    try:
        return not harness.unfinished(database)
    except (DatabaseUnreachable, SQLAlchemyError):
        return False


@pytest.mark.chaos
def test_order_is_kept_whatever_happens(postgres, crew):
    print(f"RESILIENT_CHAOS_SEED={SEED} RESILIENT_CHAOS_SECONDS={SECONDS:g}")  # noqa: T201
    rng = random.Random(SEED)
    publishers = Publishers(postgres, rng)
    disturb(postgres, crew, rng, SECONDS)
    publishers.close()
    if not crew.alive():
        crew.start(postgres, "--lease", str(LEASE))
    wait(lambda: nothing_left(postgres), 90, about=lambda: f"seed {SEED}: {harness.unfinished(postgres)} left")
    crew.stop()
    found = broken(postgres, crew.log, publishers.commits) + crew.stranded()
    committed = [id_ for _, _, ids in publishers.commits for id_ in ids]
    rescued = sum(row.rescues > 0 for row in harness.states(postgres).values())
    facts = f"seed {SEED}: {len(committed)} jobs, {rescued} rescued"
    print(facts)  # noqa: T201
    assert found == [], facts
    assert history.check(postgres, crew.log, committed=committed) == [], facts
    assert len(committed) > 3 * SECONDS


def fill(database):
    app = Resilient(database, kinds=[ORDERED], upgrade=False)
    for n in range(30):
        app.sync.enqueue(ORDERED, {"fails": n in (4, 9)}, resource_key="p/0", ordering_key=f"k{n % 2}")


@pytest.mark.parametrize("mutant", ["", "failures_let_others_pass"])
def test_the_checker_notices_a_failure_that_lets_others_pass(database, crew, mutant):
    fill(database)
    crew.finish(database, *(["--mutant", mutant] if mutant else []))
    assert {line[:2] for line in broken(database, crew.log)} == ({"O2"} if mutant else set())


def test_the_checker_notices_followers_that_are_ready(database, crew, monkeypatch):
    draw = order.draw

    def everybody(c, d, newcomers):
        return {id_: place._replace(is_head=True) for id_, place in draw(c, d, newcomers).items()}

    monkeypatch.setattr(order, "draw", everybody)
    monkeypatch.setattr(insert, "can_append", lambda *_: False)
    fill(database)
    crew.finish(database, "--slow", "0.05")
    assert {line[:2] for line in broken(database, crew.log)} == {"O2"}


def test_the_checker_notices_numbers_that_follow_calls_instead_of_commits(database, monkeypatch):
    """Two transactions one after the other whose numbers were drawn the other way round, and a number that is lost."""
    app = Resilient(database, kinds=[ORDERED], upgrade=False)
    commits = []
    for _ in range(2):
        began = time.monotonic()
        made = app.sync.enqueue(ORDERED, {"fails": 0}, resource_key="p/0", ordering_key="k")
        commits.append((began, time.monotonic(), [made.id.hex]))
    assert broken(database, "no log", commits) == []
    database.transaction_sync(lambda c, d: d.run(c, "UPDATE {job} SET order_no = 4 - order_no"))
    assert [line[:2] for line in broken(database, "no log", commits)] == ["O1", "O3"]
