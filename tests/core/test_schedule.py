"""What a schedule's row keeps, and which ticks run."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.schedules.cron import ticks
from resilient.core.schedules.schedule import (
    ScheduledAccount,
    Spec,
    Template,
    check_name,
    info,
    is_out_of_reach,
    serve,
    stamp,
    tags,
    unique_key,
)

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def hourly(**over):
    return Spec(ticks(every="1h"), Template("a/1", "null"), **over)


class TestSpec:
    @pytest.mark.parametrize(
        "spec",
        [
            hourly(),
            hourly(catch_up="all", overlap="allow", jitter=2.5),
            Spec(
                ticks(cron="30 2 * * *", zone="Europe/Berlin"),
                Template("a/1", '{"x":"\\u0000"}', 3, -5, 7, 60.0, {"user": "7"}),
            ),
            Spec(ticks(every=90, anchor=NOON), Template("a", "1")),
        ],
    )
    def test_survives_its_row(self, spec):
        assert Spec.from_json(spec.to_json()) == spec

    def test_the_row_of_one_resource_says_nothing_of_accounts(self):
        job = {
            "resource_key": "a/1", "payload": "null", "payload_version": 1, "priority": 0, "max_attempts": None,
            "expires_in": None, "tags": None,
        }  # fmt: skip
        rest = {"catch_up": "latest", "overlap": "skip", "jitter": 0.0}
        timing = {"every": 3600.0, "anchor": "1970-01-01T00:00:00+00:00"}
        assert hourly().to_json() == {"ticks": timing, "job": job, **rest}
        spread = hourly(for_each="a/*", spread=HOUR).to_json()
        assert spread == {"ticks": timing, "job": job, **rest, "for_each": "a/*", "spread": 3600.0}

    def test_what_a_newer_version_added_is_left_out(self):
        doc = hourly().to_json()
        doc["mood"] = "good"
        doc["job"]["ordering_key"] = "k"
        assert Spec.from_json(doc) == hourly()


class TestServe:
    def test_a_tick_that_is_due_runs_and_the_next_one_follows(self):
        served = serve(hourly(), NOON, NOON)
        assert (served.ticks, served.next_at) == ([NOON], NOON + HOUR)

    def test_missed_ticks_by_policy(self):
        now = NOON + 3 * HOUR + timedelta(minutes=20)
        latest = NOON + 3 * HOUR
        assert serve(hourly(), NOON, now).ticks == [latest]
        assert serve(hourly(catch_up="skip"), NOON, now).ticks == []
        every = serve(hourly(catch_up="all", overlap="allow"), NOON, now)
        assert every.ticks == [NOON, NOON + HOUR, NOON + 2 * HOUR, latest]
        assert every.next_at == NOON + 4 * HOUR

    def test_a_tick_is_never_served_twice(self):
        first = serve(hourly(catch_up="all", overlap="allow"), NOON, NOON + 2 * HOUR)
        second = serve(hourly(catch_up="all", overlap="allow"), first.next_at, NOON + 4 * HOUR)
        assert first.ticks + second.ticks == [NOON + n * HOUR for n in range(5)]

    def test_a_night_without_its_hour_ticks_once(self):
        spec = Spec(ticks(cron="30 2 * * *", zone="Europe/Berlin"), Template("a", "null"))
        before = datetime(2030, 3, 31, 0, 59, tzinfo=UTC)  # the clocks go from 2:00 to 3:00 at 1:00 UTC
        due = serve(spec, before - timedelta(days=1), before).next_at
        assert due == datetime(2030, 3, 31, 1, 0, tzinfo=UTC)
        assert serve(spec, due, due).ticks == [due]
        assert serve(spec, due, due).next_at == datetime(2030, 4, 1, 0, 30, tzinfo=UTC)


class TestJob:
    def test_the_unique_key_is_the_schedules_or_the_ticks(self):
        assert unique_key("s", hourly(), NOON) == "schedule:s"
        assert unique_key("s", hourly(), None) == "schedule:s"
        assert unique_key("s", hourly(overlap="allow"), NOON) == "schedule:s:2030-01-01T12:00:00Z"
        assert unique_key("s", hourly(overlap="allow"), None) is None

    def test_a_long_unique_key_is_hashed_and_stays_what_it_is(self):
        """Keys are in rows: another one for the same schedule would let a second job in."""
        assert unique_key("n" * 211, hourly(), None) == "schedule:" + "n" * 211
        assert unique_key("n" * 212, hourly(), None) == "schedule:32760ed3cbd8acb377d29d2d06e3fc0d"

    def test_tags_name_schedule_and_tick_beside_those_declared(self):
        spec = Spec(ticks(every=60), Template("a", "null", tags={"user": "7"}))
        assert tags("s", spec, NOON) == {"user": "7", "schedule": "s", "tick": "2030-01-01T12:00:00Z"}
        assert tags("s", spec, None) == {"user": "7", "schedule": "s"}

    def test_a_tick_is_written_in_utc(self):
        elsewhere = NOON.astimezone(datetime.strptime("+0530", "%z").tzinfo)
        assert stamp(elsewhere) == "2030-01-01T12:00:00Z"


class TestForPeople:
    def test_a_schedule_of_one_resource(self):
        row = info("s", "sync", hourly(catch_up="all", overlap="allow"), NOON, last_state="dead", paused=True)
        assert row.to_json() == {
            "name": "s", "kind": "sync", "timing": "every 1 h", "resource_key": "a/1", "catch_up": "all",
            "overlap": "allow", "next_at": "2030-01-01T12:00:00.000Z", "last_at": None, "last_job": None,
            "last_state": "dead", "succeeded_at": None, "paused": True, "removed": False, "for_each": "",
            "accounts": None,
        }  # fmt: skip

    def test_a_schedule_of_many_accounts_counts_them_later(self):
        row = info("s", "sync", hourly(for_each="a/*"), NOON)
        assert (row.for_each, row.accounts) == ("a/*", 0)

    def test_one_account_of_it(self):
        account = ScheduledAccount(
            resource_key="a/1", next_at=NOON, last_at=None, last_job=None, last_state=None, succeeded_at=NOON - HOUR
        )
        assert account.to_json() == {
            "resource_key": "a/1", "next_at": "2030-01-01T12:00:00.000Z", "last_at": None, "last_job": None,
            "last_state": None, "succeeded_at": "2030-01-01T11:00:00.000Z",
        }  # fmt: skip


@pytest.mark.parametrize("name", ["", "a b", "engine:x", "ä", "x" * 201, 'a"b', "a\\b"])
def test_names_that_cannot_be(name):
    with pytest.raises(InvalidInput, match="cannot name a schedule"):
        check_name(name)


@pytest.mark.parametrize(
    ("spec", "next_at", "expected"),
    [
        (hourly(), NOON + HOUR, False),
        (hourly(), NOON + 2 * HOUR, False),  # a clock that was set back by less than a period
        (hourly(), NOON + 3 * HOUR, True),
        (Spec(ticks(every="1m"), Template("a/1", "null")), NOON + HOUR, False),
        (Spec(ticks(every="1m"), Template("a/1", "null")), NOON + HOUR + timedelta(minutes=1), True),
        (Spec(ticks(cron="0 3 1 * *"), Template("a/1", "null")), NOON + timedelta(days=50), False),
        (Spec(ticks(cron="0 3 1 * *"), Template("a/1", "null")), NOON + timedelta(days=70), True),
        (hourly(), NOON - HOUR, False),
    ],
)
def test_a_tick_of_a_clock_that_ran_ahead_is_out_of_reach(spec, next_at, expected):
    assert is_out_of_reach(spec, next_at, NOON) is expected
