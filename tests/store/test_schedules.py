"""Rows of schedules and chores: declared, due, moved on by one winner."""

from datetime import UTC, datetime, timedelta
from threading import Barrier, Thread

import pytest

from resilient.core.schedules.cron import ticks
from resilient.core.schedules.schedule import Spec, Template
from resilient.store.schedules import ticks as schedules

HOUR = timedelta(hours=1)
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOURLY = Spec(ticks(every="1h"), Template("a/1", "null"))
DAILY = Spec(ticks(cron="0 3 * * *"), Template("a/1", "null"))


@pytest.fixture
def declare(database, clock):
    def declare(kinds=("k",), **specs):
        database.transaction_sync(schedules.declare, {n: ("k", s) for n, s in specs.items()}, kinds)

    return declare


@pytest.fixture
def row(database, clock):
    return lambda name: database.transaction_sync(schedules.get, name)


class TestChores:
    def test_one_election_each_interval(self, database, clock):
        assert database.transaction_sync(schedules.elect, "engine:x", HOUR)
        assert not database.transaction_sync(schedules.elect, "engine:x", HOUR)
        assert database.transaction_sync(schedules.elect, "engine:y", HOUR)
        clock.advance(hours=1)
        assert database.transaction_sync(schedules.elect, "engine:x", HOUR)

    def test_a_clock_that_was_a_year_ahead_stops_no_chore(self, database, clock):
        clock.advance(days=365)
        assert database.transaction_sync(schedules.elect, "engine:x", HOUR)
        assert database.transaction_sync(schedules.lead, "engine:y", None, HOUR)
        clock.advance(days=-365)
        assert database.transaction_sync(schedules.elect, "engine:x", HOUR)
        assert not database.transaction_sync(schedules.elect, "engine:x", HOUR)
        assert database.transaction_sync(schedules.lead, "engine:y", None, HOUR)
        assert not database.transaction_sync(schedules.lead, "engine:y", None, HOUR)

    def test_two_at_once_elect_one(self, database_url, open_database):
        databases = [open_database(database_url, clock=None) for _ in range(2)]
        barrier, won = Barrier(2), []

        def elect(database):
            barrier.wait()
            won.append(database.transaction_sync(schedules.elect, "engine:x", HOUR))

        threads = [Thread(target=elect, args=(d,)) for d in databases]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert sorted(won) == [False, True]

    def test_every_moment_is_looked_at_once(self, database, clock):
        start = clock.now()
        assert database.transaction_sync(schedules.look_since, "engine:x") == (start, start)
        clock.advance(30)
        assert database.transaction_sync(schedules.look_since, "engine:x") == (start, clock.now())
        clock.advance(5)
        since, until = database.transaction_sync(schedules.look_since, "engine:x")
        assert (since, until) == (clock.now() - timedelta(seconds=5), clock.now())


class TestDeclare:
    def test_a_new_schedule_ticks_from_now_on(self, declare, row, clock):
        clock.advance(minutes=20)
        declare(s=HOURLY)
        assert row("s").next_at == NOON + HOUR
        assert row("s").last_at is None

    def test_the_same_declaration_changes_nothing(self, declare, read_all, clock):
        declare(s=HOURLY)
        before = read_all("SELECT * FROM {schedule}")
        clock.advance(hours=5)
        declare(s=HOURLY)
        assert read_all("SELECT * FROM {schedule}") == before

    def test_another_payload_keeps_the_time(self, declare, row, clock):
        declare(s=HOURLY)
        clock.advance(hours=2)
        declare(s=Spec(HOURLY.ticks, Template("b/2", "[1]")))
        assert (row("s").resource_key, row("s").next_at) == ("b/2", NOON + HOUR)

    def test_another_timing_starts_anew(self, declare, row, clock):
        declare(s=HOURLY)
        clock.advance(hours=2)
        declare(s=DAILY)
        assert row("s").next_at == datetime(2030, 1, 2, 3, tzinfo=UTC)

    def test_one_that_is_gone_is_marked_and_ticks_no_more(self, declare, row, database, clock):
        declare(s=HOURLY, t=HOURLY)
        declare(t=HOURLY)
        assert (row("s").removed, row("t").removed) == (True, False)
        clock.advance(hours=1)
        assert database.transaction_sync(schedules.due, ["s", "t"]) == ["t"]
        assert database.transaction_sync(schedules.lock_if_due, "s") is None

    def test_one_that_comes_back_misses_nothing_of_the_time_between(self, declare, row, clock):
        declare(s=HOURLY)
        declare()
        clock.advance(days=9, minutes=1)
        declare(s=HOURLY)
        assert not row("s").removed
        assert row("s").next_at == NOON + timedelta(days=9, hours=1)

    def test_schedules_of_kinds_unknown_here_are_another_programs(self, declare, row):
        declare(s=HOURLY)
        declare(kinds=("other",), t=HOURLY)
        assert not row("s").removed

    @pytest.mark.usefixtures("clock")
    def test_two_programs_start_at_once(self, database_url, open_database):
        databases = [open_database(database_url) for _ in range(3)]
        barrier, errors = Barrier(3), []

        def start(database, spec):
            barrier.wait()
            try:
                declared = {f"s{n}": ("k", spec) for n in range(20)}
                database.transaction_sync(schedules.declare, declared, ["k"])
            except Exception as error:  # noqa: BLE001 - reported below
                errors.append(error)

        threads = [Thread(target=start, args=(d, s)) for d, s in zip(databases, [HOURLY, DAILY, HOURLY], strict=True)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert errors == []
        assert len(databases[0].transaction_sync(schedules.page)) == 20


class TestDue:
    def test_only_what_is_due_and_known_longest_due_first(self, declare, database, clock):
        declare(s=DAILY, t=HOURLY, u=HOURLY, v=DAILY)
        clock.advance(days=1)
        assert database.transaction_sync(schedules.due, ["s", "t", "v"]) == ["t", "s", "v"]
        assert database.transaction_sync(schedules.due, ["s", "t", "v"], 2) == ["t", "s"]
        assert database.transaction_sync(schedules.due, []) == []

    def test_chores_are_never_due(self, database, clock):
        database.transaction_sync(schedules.elect, "engine:x", HOUR)
        clock.advance(days=1)
        assert database.transaction_sync(schedules.due, ["engine:x"]) == []

    def test_the_look_is_one_index_probe(self, postgres_database):
        def plan(c, d):
            d.run(
                c,
                "INSERT INTO {schedule} (name, kind, spec, next_at, updated_at) SELECT 's' || n, 'k', '{{}}',"
                " clock_timestamp() + interval '1 day', clock_timestamp() FROM generate_series(1, 20000) n",
            )
            c.exec_driver_sql("ANALYZE resilient_schedule")
            return "\n".join(
                r[0]
                for r in d.run(
                    c,
                    "EXPLAIN SELECT name FROM {schedule} WHERE kind IS NOT NULL AND NOT paused AND NOT removed"
                    " AND next_at <= clock_timestamp() ORDER BY next_at LIMIT 100",
                )
            )

        assert "resilient_schedule_due" in postgres_database.transaction_sync(plan)


class TestTicks:
    def test_whoever_comes_second_sees_no_row(self, database_url, open_database, clock, declare):
        declare(s=HOURLY)
        clock.advance(hours=1)
        database = open_database(database_url)
        (row, now) = database.transaction_sync(lambda c, d: _move(c, d, schedules.lock_if_due(c, d, "s")))
        assert (row.name, now) == ("s", clock.now())
        assert database.transaction_sync(schedules.lock_if_due, "s") is None

    def test_a_locked_row_is_passed_over_and_not_waited_for(self, postgres_url, open_database, clock):
        one, two = open_database(postgres_url), open_database(postgres_url)
        one.transaction_sync(schedules.declare, {"s": ("k", HOURLY)}, ["k"])
        clock.advance(hours=1)

        def locked(c, d):
            assert schedules.lock_if_due(c, d, "s") is not None
            return two.transaction_sync(schedules.lock_if_due, "s")

        assert one.transaction_sync(locked) is None

    def test_pausing_and_going_on(self, declare, row, database, clock):
        declare(s=HOURLY)
        held = database.transaction_sync(schedules.lock, "s")
        database.transaction_sync(schedules.set_paused, held, paused=True)
        clock.advance(hours=7, minutes=1)
        assert database.transaction_sync(schedules.due, ["s"]) == []
        assert row("s").paused
        database.transaction_sync(schedules.set_paused, held, paused=False)
        assert (row("s").paused, row("s").next_at) == (False, NOON + 8 * HOUR)


def _move(c, d, found):
    row, now = found
    schedules.move_on(c, d, row.name, now, next_at=now + HOUR, last_at=now, job=None)
    return found
