"""What a schedule's row keeps, and which ticks run."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.base.errors import InvalidInput
from resilient.core.schedules.cron import ticks
from resilient.core.schedules.schedule import Spec, Template, check_name, serve, stamp, tags, unique_key

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

    def test_tags_name_schedule_and_tick_beside_those_declared(self):
        spec = Spec(ticks(every=60), Template("a", "null", tags={"user": "7"}))
        assert tags("s", spec, NOON) == {"user": "7", "schedule": "s", "tick": "2030-01-01T12:00:00Z"}
        assert tags("s", spec, None) == {"user": "7", "schedule": "s"}

    def test_a_tick_is_written_in_utc(self):
        elsewhere = NOON.astimezone(datetime.strptime("+0530", "%z").tzinfo)
        assert stamp(elsewhere) == "2030-01-01T12:00:00Z"


@pytest.mark.parametrize("name", ["", "a b", "engine:x", "ä", "x" * 201, 'a"b', "a\\b"])
def test_names_that_cannot_be(name):
    with pytest.raises(InvalidInput, match="cannot name a schedule"):
        check_name(name)
