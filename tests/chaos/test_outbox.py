"""The outbox under fire: nothing lost, nothing invented, in order; and the checker notices when it is not so.

RESILIENT_CHAOS_SECONDS (default 15) is how long it lasts, RESILIENT_CHAOS_SEED repeats a run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import address, wait
from sqlalchemy import create_engine
from sqlmodel import Session

sys.path.insert(0, str(Path(__file__).parent))
import outbox_world as world

from tests import nursery

CHILD = Path(__file__).with_name("outbox_child.py")
SECONDS = float(os.environ.get("RESILIENT_CHAOS_SECONDS", "15"))
SEED = int(os.environ.get("RESILIENT_CHAOS_SEED", random.randrange(10**6)))
LEASE = 1.0
ENOUGH = 200  # commits of a business: then each thing that happens at random has happened
OPEN = "SELECT count(*) FROM resilient_job WHERE state NOT IN ('succeeded', 'cancelled')"

pytestmark = [pytest.mark.chaos, pytest.mark.proof("tests/engine/test_outbox.py, and the events of the simulation")]


class Relays:
    """Worker processes, killed, stopped and replaced."""

    def __init__(self, database, sink, mutant=""):
        self.arguments = (CHILD, address(database), sink.port, LEASE, mutant)
        self.alive, self.stopped = [], {}

    def start(self, count=1):
        self.alive += [nursery.start(*self.arguments) for _ in range(count)]
        return self

    def revive(self):
        """One whose database session is cut while it starts gives up; whoever runs it starts it again."""
        gone = [one for one in self.alive if one.poll() is not None]
        self.alive = [one for one in self.alive if one not in gone]
        self.start(len(gone))

    def kill(self, dice):
        one = self.alive.pop(dice.randrange(len(self.alive)))
        one.send_signal(signal.SIGCONT)
        one.kill()
        one.wait()
        self.start()

    def freeze(self, dice):
        """Longer than its lease, most of the time."""
        one = dice.choice(self.alive)
        one.send_signal(signal.SIGSTOP)
        self.stopped[one] = time.monotonic() + LEASE * dice.uniform(0.5, 3)

    def thaw(self, *, everybody=False):
        for one, until in list(self.stopped.items()):
            if everybody or time.monotonic() > until:
                del self.stopped[one]
                one.send_signal(signal.SIGCONT)

    def close(self):
        for one in self.alive:
            one.send_signal(signal.SIGCONT)
            one.kill()
            one.wait()


@pytest.fixture
def postgres(postgres_url, open_database):
    return open_database(postgres_url, connections=12)


def cut(database, dice):
    """End the database sessions of some, in the middle of whatever they do."""
    engine = create_engine(database.sync_engine.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as c, contextlib.suppress(Exception):
        others = c.exec_driver_sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY 1"
        ).all()
        for (pid,) in dice.sample(others, min(3, len(others))):
            c.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")
    engine.dispose()


def count(database):
    with database.sync_engine.begin() as c:
        return c.exec_driver_sql(OPEN).scalar_one()


def test_nothing_lost_nothing_invented_in_order(postgres):
    dice, sink = random.Random(SEED), world.Sink(SEED)
    business = world.Business(postgres, SEED)
    relays = Relays(postgres, sink).start(3)
    harm = {"kill": 0, "freeze": 0, "cut": 0}
    try:
        business.start()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until or business.commits <= ENOUGH:
            time.sleep(dice.uniform(0.2, 0.8))
            what = dice.choice(list(harm))
            harm[what] += 1
            {"kill": relays.kill, "freeze": relays.freeze, "cut": lambda d: cut(postgres, d)}[what](dice)
            relays.thaw()
            relays.revive()
        business.stop()
        relays.thaw(everybody=True)
        relays.revive()
        wait(
            lambda: count(postgres) == 0, timeout=60 + SECONDS / 2, about=lambda: f"seed {SEED}: {count(postgres)} left"
        )
        time.sleep(0.2)  # what a stopped process sent before it was stopped
        committed, arrived = business.committed(), list(sink.arrived)
    finally:
        business.stop()
        relays.close()
        sink.close()
    assert world.check(committed, arrived, sink.dropped, sum(harm.values())) == [], f"seed {SEED}"
    assert len(committed) > ENOUGH
    assert sink.dropped > 0
    assert all(harm.values())
    more = len(arrived) - len(set(arrived))
    print(  # noqa: T201 - what the run was worth
        f"seed {SEED}: {len(committed)} events, {harm}, {sink.dropped} answers lost, {more} duplicates"
        f" ({(more - sink.dropped) / sum(harm.values()):.2f} for each harm beyond those)"
    )


class TestTheCheckerNotices:
    """Each rule is broken once, in the engine or around it."""

    def run(self, postgres, *, mutant="", publish=None, things=20):
        sink = world.Sink(1)
        business = world.Business(postgres, 1, publish=publish, things=things, pause=0.01)
        relays = Relays(postgres, sink, mutant).start(2)
        try:
            business.start()
            wait(lambda: business.commits >= ENOUGH, about="the business stands still")
            business.stop()
            wait(lambda: count(postgres) == 0, timeout=60)
            return {line[:2] for line in world.check(business.committed(), list(sink.arrived), sink.dropped)}
        finally:
            business.stop()
            relays.close()
            sink.close()

    def test_nothing_is_wrong(self, postgres):
        assert self.run(postgres) == set()

    def test_a_refusal_taken_for_a_confirm(self, postgres):
        assert "O1" in self.run(postgres, mutant="deaf")

    def test_an_event_written_before_the_commit(self, postgres):
        app = world.app(postgres)

        def early(_session, event, *, key):
            with Session(postgres.sync_engine) as s:
                app.outbox.publish(s, event, key=key)
                s.commit()

        # Many things, so that hardly one is changed twice: the version of a change that was rolled back comes again.
        assert "O2" in self.run(postgres, publish=early, things=2_000)

    def test_no_ordering_key(self, postgres):
        app = world.app(postgres)
        assert {"O3", "O4"} & self.run(postgres, publish=lambda s, event, **_: app.outbox.publish(s, event))

    def test_in_the_checker_alone(self):
        committed = {("a", 1), ("a", 2), ("a", 3)}
        good = [("a", 1, 1), ("a", 2, 2), ("a", 3, 3)]
        assert world.check(committed, good) == []
        assert [line[:2] for line in world.check(committed, good[:2])] == ["O1"]
        assert [line[:2] for line in world.check(committed, [*good, ("a", 4, 4)])] == ["O2"]
        assert [line[:2] for line in world.check(committed, [good[1], good[0], good[2]])] == ["O3"]
        assert [line[:2] for line in world.check(committed, [*good[:2], ("a", 3, 5)])] == ["O4"]
        assert [line[:2] for line in world.check(committed, good * 50)] == ["O5"]
        assert world.check(committed, good * 5, dropped=12) == []
        assert [line[:2] for line in world.check(committed, good * 50, harms=73)] == ["O5"]
        assert world.check(committed, good * 50, harms=74) == []
