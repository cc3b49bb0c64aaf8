"""Each account's own ticks between those of the schedule."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.schedules import schedule
from resilient.core.schedules.cron import ticks
from resilient.core.schedules.schedule import Spec, Template, unique_key

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def spec(spread_=None, *, every="1h", cron=None, **options):
    timing = ticks(cron=cron) if cron else ticks(every=every)
    return Spec(timing, Template("", "null"), for_each="github/*", spread=spread_, **options)


def serve(made, next_at, now, place):
    return schedule.window(made, next_at, now).serve(made, next_at, place)


def test_places_are_even_stable_and_differ_by_schedule():
    places = [schedule.place("s", f"github/{n}") for n in range(10_000)]
    counts = [sum(1 for p in places if n / 20 <= p < (n + 1) / 20) for n in range(20)]
    assert sum(counts) == 10_000
    assert min(counts) > 400
    assert max(counts) < 600
    assert schedule.place("s", "github/7") == places[7] == 0.7849251029736987
    assert schedule.place("t", "github/7") != places[7]


def test_an_accounts_tick_lies_behind_the_schedules():
    assert serve(spec(), NOON, NOON + 10 * HOUR / 60, 0.5).ticks == []
    served = serve(spec(), NOON, NOON + 31 * HOUR / 60, 0.5)
    assert (served.ticks, served.next_at) == ([NOON + HOUR / 2], NOON + 3 * HOUR / 2)


@pytest.mark.parametrize(
    ("wanted", "at"),
    [(timedelta(), NOON), (timedelta(minutes=10), NOON + timedelta(minutes=9)), (3 * HOUR, NOON + 0.9 * HOUR)],
)
def test_a_span_of_its_own_never_reaches_the_next_tick(wanted, at):
    assert serve(spec(wanted), NOON, NOON + HOUR - timedelta(seconds=1), 0.9).ticks == [at]


def test_the_time_between_ticks_of_a_cron_expression():
    made = spec(cron="0 3,9 * * *")
    three = datetime(2030, 1, 2, 3, tzinfo=UTC)
    assert serve(made, NOON, three, 0.5).next_at == three + 3 * HOUR
    assert serve(made, three, three + 6 * HOUR, 0.5).next_at == three + 15 * HOUR  # 18 hours until 03:00


@pytest.mark.parametrize("place", [0.0, 0.25, 0.999999])
@pytest.mark.parametrize(("catch_up", "count"), [("latest", 1), ("skip", 0), ("all", 9)])
def test_ticks_nobody_was_there_for(place, catch_up, count):
    first = NOON + place * HOUR
    now = first + 8 * HOUR + timedelta(minutes=20)
    served = serve(spec(catch_up=catch_up), first, now, place)
    assert served.ticks == [first + n * HOUR for n in range(9)][9 - count :]
    assert served.next_at == first + 9 * HOUR


@pytest.mark.parametrize(
    ("catch_up", "since", "starts"),
    [
        ("all", NOON - 3 * HOUR / 2, [-2, -1, 0, 1]),
        ("all", NOON - 900 * HOUR, [*range(-100, 1), 1]),
        ("latest", NOON - 900 * HOUR, [-1, 0, 1]),
        ("skip", NOON - HOUR / 2, [-1, 0, 1]),
    ],
)
def test_a_window_holds_no_more_ticks_than_any_place_needs(catch_up, since, starts):
    """However long nobody was there: it is made for each batch of accounts."""
    made = schedule.window(spec(catch_up=catch_up), since, NOON)
    assert made.ticks == tuple((NOON + n * HOUR, HOUR) for n in starts)


@pytest.mark.parametrize(
    ("now", "place", "expected"),
    [
        (NOON, 0.0, [NOON]),  # at its very moment
        (NOON + timedelta(seconds=10), 0.5, [NOON + timedelta(seconds=10)]),
        (NOON + timedelta(seconds=9), 0.5, [NOON - timedelta(seconds=10)]),
    ],
)
@pytest.mark.parametrize("catch_up", ["latest", "skip"])
def test_of_several_missed_ones_the_last_runs(catch_up, now, place, expected):
    served = serve(spec(every=20, catch_up=catch_up), NOON - HOUR, now, place)
    assert served.ticks == expected
    assert served.next_at == expected[0] + timedelta(seconds=20)


def test_a_minute_late_is_not_missed():
    made = spec(catch_up="skip")
    assert serve(made, NOON, NOON + timedelta(seconds=60), 0.0).ticks == [NOON]
    assert serve(made, NOON, NOON + timedelta(seconds=61), 0.0).ticks == []


def test_all_means_at_most_a_hundred():
    assert len(serve(spec(every=1, catch_up="all"), NOON, NOON + HOUR, 0.5).ticks) == 100


def test_walking_forward_brings_each_tick_once():
    made, at, found = spec(), NOON, []
    for minute in range(0, 600, 7):
        served = serve(made, at, NOON + timedelta(minutes=minute), 0.77)
        found += served.ticks
        at = served.next_at
    assert found == [NOON + (n + 0.77) * HOUR for n in range(10)]


def test_an_accounts_silence_is_whole_periods_long():
    before = schedule.silent_before(ticks(every="1h"), NOON + HOUR / 2, 3)
    assert before == NOON - 4 * HOUR


def test_stored_and_read_again():
    for wanted in (None, timedelta(), HOUR):
        assert Spec.from_json(spec(wanted).to_json()) == spec(wanted)


def test_unique_keys_always_fit():
    short, long = unique_key("s", spec(), None, "github/7"), unique_key("s" * 200, spec(), NOON, "g/" + "k" * 250)
    assert short == "schedule:s:github/7"
    assert len(long) < 255
    assert long != unique_key("s" * 200, spec(), NOON, "g/" + "k" * 249)
    allowed = unique_key("s" * 200, spec(overlap="allow"), NOON, "g/" + "k" * 250)
    assert allowed.endswith(":2030-01-01T12:00:00Z")
    assert len(allowed) < 255
