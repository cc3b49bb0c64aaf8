"""Ticks: cron through both changes of the clocks, anchored intervals, missed ticks, bad input."""

import itertools
import time
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.core.base.errors import BadCron, InvalidInput, NaiveDatetime
from resilient.core.schedules.cron import Ticks, back, missed, next_after, ticks
from resilient.core.schedules.schedule import stamp

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)  # a Sunday


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def series(spec: Ticks, after: datetime, count: int) -> list[datetime]:
    found = []
    for _ in range(count):
        after = next_after(spec, after)
        found.append(after)
    return found


def local(spec: Ticks, after: str, count: int) -> list[str]:
    zone = ZoneInfo(spec.zone)
    return [f"{t.astimezone(zone):%d %H:%M%z}" for t in series(spec, at(after), count)]


# -- plain ticks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("* * * * *", ["01 12:01", "01 12:02"]),
        ("*/15 * * * *", ["01 12:15", "01 12:30"]),
        ("0 12 * * *", ["02 12:00", "03 12:00"]),  # later than now, not now
        ("30 3 * * mon-fri", ["02 03:30", "03 03:30"]),
        ("0 0 1 * *", ["01 00:00", "01 00:00"]),
        ("0 0 L * *", ["31 00:00", "30 00:00"]),
        ("0 9 * * 1#1", ["02 09:00", "06 09:00"]),
        ("30 0 * * * *", ["01 12:00:30", "01 13:00:30"]),
        ("@hourly", ["01 13:00", "01 14:00"]),
        ("@DAILY", ["02 00:00", "03 00:00"]),
        (" 0 12 * * 7 ", ["08 12:00", "15 12:00"]),
    ],
)
def test_cron(cron, expected):
    found = series(ticks(cron=cron), NOW, 2)
    form = "%d %H:%M:%S" if ":30" in expected[0][6:] else "%d %H:%M"
    assert [f"{t:{form}}" for t in found] == expected
    assert all(t.tzinfo is UTC for t in found)


def test_a_zone_moves_the_ticks():
    assert next_after(ticks(cron="0 9 * * *", zone="America/New_York"), NOW) == at("2026-03-01T14:00Z")
    assert next_after(ticks(cron="0 9 * * *", zone="Asia/Kolkata"), NOW) == at("2026-03-02T03:30Z")


def test_fractions_of_a_second():
    spec = ticks(cron="* * * * *")
    just_before, just_after = NOW - timedelta(microseconds=1), NOW + timedelta(microseconds=1)
    assert next_after(spec, just_before) == NOW
    assert next_after(spec, just_after) == NOW + timedelta(minutes=1)
    assert back(spec, just_before, 1)[0] == NOW - timedelta(minutes=1)
    assert back(spec, NOW, 1)[0] == back(spec, just_after, 1)[0] == NOW


# -- changes of the clocks -------------------------------------------------------------------------

SPRING, AUTUMN = (
    "2026-03-28T12:00Z",
    "2026-10-24T12:00Z",
)  # Berlin: 02 -> 03 on 29 March, 03 -> 02 on 25 October


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        # fixed minute and hour: once on every day
        ("30 2 * * *", SPRING, ["29 03:00+0200", "30 02:30+0200"]),  # skipped: right after the gap
        ("15,45 2 * * *", "2026-03-28T01:20Z", ["28 02:45+0100", "29 03:00+0200", "30 02:15+0200"]),  # one, not two
        ("0 3 * * *", SPRING, ["29 03:00+0200", "30 03:00+0200"]),
        ("30 2 * * *", AUTUMN, ["25 02:30+0200", "26 02:30+0100"]),  # comes twice: the first
        ("30 2,3 * * *", AUTUMN, ["25 02:30+0200", "25 03:30+0100"]),
        ("0 0 * * *", AUTUMN, ["25 00:00+0200", "26 00:00+0100"]),
        # a star in minute or hour: by elapsed time
        ("30 * * * *", "2026-03-29T00:00Z", ["29 01:30+0100", "29 03:30+0200"]),
        ("30 * * * *", "2026-10-25T00:00Z", ["25 02:30+0200", "25 02:30+0100", "25 03:30+0100"]),
        ("*/30 2 * * *", SPRING, ["30 02:00+0200", "30 02:30+0200"]),
        ("*/30 2 * * *", AUTUMN, ["25 02:00+0200", "25 02:30+0200", "25 02:00+0100", "25 02:30+0100"]),
        ("0 30 2 * * *", AUTUMN, ["25 02:30+0200", "25 02:30+0100", "26 02:30+0100"]),  # with seconds: both
        ("*/20 2 * * *", "2026-10-25T00:30Z", ["25 02:40+0200", "25 02:00+0100", "25 02:20+0100", "25 02:40+0100"]),
    ],
)
def test_daylight_saving(cron, after, expected):
    spec = ticks(cron=cron, zone="Europe/Berlin")
    assert local(spec, after, len(expected)) == expected
    is_whole(spec, series(spec, at(after), len(expected)))


def is_whole(spec, moments):
    """Whoever starts at any of these, or between two, in either direction, finds the same ones, each once, in UTC."""
    for index, moment in enumerate(moments, 1):
        for now in (moment, moment + timedelta(microseconds=1)):
            assert back(spec, now, index) == moments[:index]
            assert series(spec, now, len(moments) - index) == moments[index:]
    assert all(tick.tzinfo is UTC for tick in back(spec, moments[-1], len(moments)) + series(spec, moments[0], 2))


@pytest.mark.parametrize(
    ("zone", "cron", "after", "expected"),
    [
        (
            "Europe/London",
            "*/30 1 * * *",
            "2026-10-24T12:00Z",
            ["01:00+0100", "01:30+0100", "01:00+0000", "01:30+0000"],
        ),
        (
            "Atlantic/Azores",
            "*/30 0 * * *",
            "2026-10-24T12:00Z",
            ["00:00+0000", "00:30+0000", "00:00-0100", "00:30-0100"],
        ),
        ("America/New_York", "30 2 * * *", "2026-03-07T12:00Z", ["03:00-0400", "02:30-0400"]),
        (
            "America/New_York",
            "*/30 1 * * *",
            "2026-10-31T12:00Z",
            ["01:00-0400", "01:30-0400", "01:00-0500", "01:30-0500"],
        ),
    ],
)
def test_daylight_saving_west_of_greenwich(zone, cron, after, expected):
    spec = ticks(cron=cron, zone=zone)
    assert [text[3:] for text in local(spec, after, len(expected))] == expected
    is_whole(spec, series(spec, at(after), len(expected)))


@pytest.mark.parametrize("minute", range(60))
def test_every_skipped_minute_ticks_right_after_the_gap(minute):
    spec = ticks(cron=f"{minute} 2 * * *", zone="Europe/Berlin")
    tick = next_after(spec, at(SPRING))
    assert tick == at("2026-03-29T01:00Z")
    assert tick.tzinfo is UTC


def test_the_zone_of_the_machine_plays_no_part(elsewhere):
    for zone, cron, after, expected in (
        ("Europe/Berlin", "30 2 * * *", SPRING, "2026-03-29T01:00Z"),
        ("America/New_York", "30 2 * * *", "2026-03-08T00:00Z", "2026-03-08T07:00Z"),
        ("Europe/Berlin", "*/30 2 * * *", "2026-10-25T00:45Z", "2026-10-25T01:00Z"),
    ):
        assert next_after(ticks(cron=cron, zone=zone), at(after)) == at(expected)
    every = ticks(every="1h", anchor=datetime.fromisoformat("2030-01-01T00:20:00+05:30"))
    assert every.to_json() == {"every": 3600.0, "anchor": "2029-12-31T18:50:00+00:00"}
    assert stamp(next_after(every, NOW)) == "2026-03-01T12:50:00Z"
    assert stamp(datetime.fromisoformat("2030-01-01T00:20:00+05:30")) == "2029-12-31T18:50:00Z"


@pytest.fixture(params=["Asia/Tokyo", "America/Los_Angeles"])
def elsewhere(request, monkeypatch):
    """A machine with another time zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield
    time.tzset()


def test_a_shift_of_half_an_hour():
    """Lord Howe Island: 02:00 becomes 01:30 on 5 April 2026."""
    spec = ticks(cron="*/30 * * * *", zone="Australia/Lord_Howe")
    assert local(spec, "2026-04-04T14:15Z", 5) == [
        "05 01:30+1100", "05 01:30+1030", "05 02:00+1030", "05 02:30+1030", "05 03:00+1030",
    ]  # fmt: skip


def test_a_day_that_was_skipped():
    """Samoa had no 30 December 2011."""
    spec = ticks(cron="0 12 * * *", zone="Pacific/Apia")
    assert local(spec, "2011-12-29T00:00Z", 3) == ["29 12:00-1000", "31 00:00+1400", "31 12:00+1400"]


ZONES = st.sampled_from(
    [
        "UTC",
        "Europe/Berlin",
        "America/New_York",
        "Australia/Lord_Howe",
        "America/Santiago",
        "Africa/Casablanca",
        "Asia/Tokyo",
    ]
)
CRONS = st.sampled_from(
    [
        "30 2 * * *",
        "*/30 2 * * *",
        "0 * * * *",
        "*/20 * * * *",
        "0 0 * * *",
        "15 1,2,3 * * *",
        "0,30 2,3 * * *",
        "0 */2 * * *",
        "5 4 * * sun",
        "0 1-4 * * *",
        "0 0,30 0-3 * * *",
        "0 12 1 * *",
        "59 23 L * *",
        "*/7 * * * *",
    ]
)
SPAN = (datetime(2020, 1, 1), datetime(2031, 1, 1))  # noqa: DTZ001 - Hypothesis adds the zone
MOMENTS = st.datetimes(*SPAN, timezones=st.just(UTC))
CHANGES = st.builds(  # around the changes of the clocks, where it is hard
    lambda day, seconds: datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(seconds=seconds),
    st.sampled_from(["2026-03-29", "2026-10-25", "2026-11-01", "2026-04-04", "2026-10-03", "2026-09-06", "2026-02-15"]),
    st.integers(-86400, 172800),
)
SPECS = st.builds(lambda cron, zone: ticks(cron=cron, zone=zone), CRONS, ZONES)
EVERY = st.builds(
    lambda every, anchor: ticks(every=every, anchor=anchor),
    st.timedeltas(timedelta(seconds=1), timedelta(days=40)),
    st.none() | MOMENTS,
)


@settings(deadline=None)
@given(SPECS | EVERY, MOMENTS | CHANGES)
def test_forwards_and_backwards_agree(spec, now):
    """Whoever starts when, in whatever process: the same ticks."""
    after = next_after(spec, now)
    assert after > now
    assert back(spec, after, 1)[0] == after
    before = back(spec, now, 1)[0]
    assert before <= now
    assert next_after(spec, before) == after
    assert next_after(spec, after - timedelta(microseconds=1)) == after
    assert back(spec, after - timedelta(microseconds=1), 1)[0] == before


@settings(deadline=None)
@given(CRONS, ZONES, MOMENTS | CHANGES)
def test_ticks_show_the_named_minute(cron, zone, now):
    spec = ticks(cron=cron, zone=zone)
    tick = next_after(spec, now).astimezone(ZoneInfo(zone))
    if cron in ("0 * * * *", "*/20 * * * *", "0 12 1 * *", "59 23 L * *"):
        assert tick.minute in {"0": (0,), "*/20": (0, 20, 40), "59": (59,)}[cron.split()[0]]
    assert tick.second == tick.microsecond == 0


# -- intervals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "seconds"),
    [
        ("1h", 3600),
        ("15m", 900),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("2d", 172800),
        ("90s", 90),
        (90, 90),
        (1.5, 1.5),
        (timedelta(minutes=5), 300),
    ],
)
def test_intervals(every, seconds):
    assert ticks(every=every).every == timedelta(seconds=seconds)


def test_an_interval_is_anchored_and_never_drifts():
    hourly = ticks(every="1h")
    assert next_after(hourly, at("2026-03-01T12:34:56Z")) == at("2026-03-01T13:00Z")
    assert next_after(hourly, at("2026-03-01T13:00Z")) == at("2026-03-01T14:00Z")
    late = at("2026-03-01T13:00:07Z")  # served seven seconds late: the next one is not
    assert next_after(hourly, late) == at("2026-03-01T14:00Z")
    anchored = ticks(every="1h", anchor=at("2030-01-01T00:20:00+01:00"))  # also before its anchor
    assert next_after(anchored, NOW) == at("2026-03-01T12:20Z")
    assert back(anchored, NOW, 1)[0] == at("2026-03-01T11:20Z")


def test_there_is_no_tick_before_all_time():
    ten_years = ticks(every="3653d", anchor=NOW)
    ticked = back(ten_years, NOW, 1000)
    assert (ticked[0].year, len(ticked)) == (5, 203)
    assert back(ten_years, ticked[0], 5) == ticked[:1]


# -- missed ticks ----------------------------------------------------------------------------------

HOURLY = [ticks(cron="0 * * * *"), ticks(every="1h")]


@pytest.mark.parametrize("spec", HOURLY, ids=str)
@pytest.mark.parametrize(
    ("policy", "now", "expected"),
    [
        ("latest", "2026-03-01T12:00:03Z", [12]),
        ("latest", "2026-03-01T14:59:59Z", [14]),
        ("latest", "2026-03-01T11:59:59Z", []),
        ("latest", "2026-03-01T12:00:00Z", [12]),
        ("all", "2026-03-01T12:00:03Z", [12]),
        ("all", "2026-03-01T15:30:00Z", [12, 13, 14, 15]),
        ("all", "2026-03-01T11:30:00Z", []),
        ("all", "2026-03-02T15:30:00Z", [11, 12, 13, 14, 15]),  # the newest five
        ("skip", "2026-03-01T12:00:03Z", [12]),  # on time is not missed
        ("skip", "2026-03-01T12:01:00Z", [12]),
        ("skip", "2026-03-01T12:01:01Z", []),
        ("skip", "2026-03-01T15:00:02Z", [15]),
        ("skip", "2026-03-01T15:30:00Z", []),
    ],
)
def test_missed(spec, policy, now, expected):
    found = missed(spec, at("2026-03-01T11:00Z"), at(now), policy, most=5)
    assert [t.hour for t in found] == expected
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("since", "expected"),
    [("11:59", [11, 12]), ("11:00", [10, 11, 12]), ("10:30", [10, 11, 12]), (None, [9, 10, 11, 12])],
)
@pytest.mark.parametrize("spec", HOURLY, ids=str)
def test_back_ends_with_the_last_tick_before_since(spec, since, expected):
    since = since and at(f"2026-03-01T{since}Z")
    assert [tick.hour for tick in back(spec, NOW, 4, since)] == expected


@pytest.mark.parametrize("policy", ["skip", "latest"])
def test_of_several_within_the_grace_one_runs(policy):
    assert missed(ticks(every=10), NOW - timedelta(seconds=60), NOW, policy) == [NOW]


def test_missed_by_default_runs_once():
    assert missed(HOURLY[0], NOW - timedelta(days=30), NOW + timedelta(minutes=1)) == [NOW]


def test_a_longer_grace():
    assert missed(
        HOURLY[0], NOW - timedelta(hours=5), NOW + timedelta(minutes=30), "skip", grace=timedelta(hours=1)
    ) == [NOW]


@pytest.mark.parametrize("spec", [ticks(cron="* * * * *", zone="Europe/Berlin"), ticks(every="1s")], ids=str)
def test_years_of_missed_ticks_cost_nothing(spec):
    started = time.thread_time()
    assert len(missed(spec, NOW - timedelta(days=3650), NOW, "all", most=100)) == 100
    assert len(missed(spec, NOW - timedelta(days=3650), NOW)) == 1
    assert time.thread_time() - started < 1


@settings(deadline=None)
@given(SPECS | EVERY, MOMENTS | CHANGES, st.integers(1, 6), st.timedeltas(timedelta(0), timedelta(hours=1)))
def test_each_tick_is_served_exactly_once(spec, start, rounds, late):
    """However late and irregularly one looks, "all" hands out every tick once, in order."""
    expected = series(spec, start, rounds)
    served, last = [], start
    for tick in itertools.islice(expected, 0, None, 2):
        found = missed(spec, last, tick, "all")
        served += found
        last = tick
    assert served == expected[: len(served)]
    assert len(served) >= rounds - 1


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cron",
    [
        "",
        " ",
        "* * * *",
        "* * * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 8",
        "*/0 * * * *",
        "a * * * *",
        "1-0 * * * *",
        "@never",
        "0 0 30 2 *",
        "0 0 31 4,6 *",
        "0 0 * * 1#6",
        "٣ * * * *",
        "-1 * * * *",
        "* * * * mon#",
        "0 0 * * L",
        "1,,2 * * * *",
        "0 0 0 0 0",
        "1 " * 200,
        "* * * * *\n* * * * *",
    ],
)
def test_bad_cron_is_named_with_the_remedy(cron):
    with pytest.raises(BadCron, match=r"such as '0 3 \* \* \*'|never ticks") as caught:
        ticks(cron=cron)
    assert repr(cron)[:30] in str(caught.value)
    assert isinstance(caught.value, InvalidInput)


FIELDS = "Write minute, hour, day of month, month and day of week, such as '0 3 * * *' or '*/15 8-18 * * mon-fri'"
INTERVALS = "write seconds, a timedelta, or text such as '1h', '15m' or '1h30m', from 1 second to 10 years"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "a schedule needs either cron=..., such as '0 3 * * *', or every=..., such as '1h'"),
        ({"cron": "60 * * * *"}, f"cron '60 * * * *': bad minute. {FIELDS}"),
        ({"cron": "0 0 */31 * 0#5"}, "cron '0 0 */31 * 0#5' never ticks: no day fits all of its fields"),
        ({"cron": "1" * 201}, f"cron '{'1' * 40}' is no cron expression: write five fields, such as '0 3 * * *'"),
        ({"cron": "0 3 * * *", "anchor": NOW}, "cron '0 3 * * *' takes no anchor: that is for every=..."),
        (
            {"cron": "0 3 * * *", "zone": "Europe/Atlantis"},
            "time zone 'Europe/Atlantis' is not known: use an IANA name, such as 'Europe/Berlin'",
        ),
        (
            {"every": "1h", "zone": "Europe/Berlin"},
            "every='1h' takes no time zone ('Europe/Berlin'): use cron for times of day, or an anchor",
        ),
        (
            {"every": timedelta(days=3653, seconds=1)},
            f"every={timedelta(days=3653, seconds=1)!r} is no interval: {INTERVALS}",
        ),
        ({"every": "0s"}, f"every='0s' is no interval: {INTERVALS}"),
    ],
)
def test_what_is_wrong_is_said(given, text):
    with pytest.raises(BadCron) as caught:
        ticks(**given)
    assert str(caught.value) == text


def test_the_longest_that_are_taken():
    expression = "0," * 95 + "00 3 * * *"
    assert len(expression) == 200
    assert ticks(cron=expression).cron == expression
    assert ticks(every=timedelta(days=3653)).every == timedelta(days=3653)


@pytest.mark.parametrize(
    "every",
    [
        "",
        "0s",
        "soon",
        "1",
        "-1h",
        "1x",
        0,
        -5,
        0.5,
        float("nan"),
        float("inf"),
        True,
        timedelta(0),
        "99999d",
        [],
    ],
)
def test_bad_intervals_are_named_with_the_remedy(every):
    with pytest.raises(BadCron, match="is no interval: write seconds, a timedelta, or text such as '1h'") as caught:
        ticks(every=every)
    assert f"every={every!r}" in str(caught.value)


@pytest.mark.parametrize(
    "zone", ["Europe/Atlantis", "CEST+1", "", "Europe", "../etc/passwd", "/etc/passwd", "\x00", None, 7]
)
def test_bad_zones_are_named_with_the_remedy(zone):
    with pytest.raises(BadCron, match="use an IANA name, such as 'Europe/Berlin'") as caught:
        ticks(cron="0 3 * * *", zone=zone)
    assert repr(zone) in str(caught.value)


@pytest.mark.parametrize("zone", [[], {}, b"UTC"])
def test_a_zone_that_is_no_text(zone):
    with pytest.raises(BadCron, match="is not known: use an IANA name"):
        ticks(cron="0 3 * * *", zone=zone)


def test_an_anchor_that_is_no_time():
    with pytest.raises(BadCron, match="anchor='x' is no datetime: use datetime"):
        ticks(every=5, anchor="x")


def test_bad_combinations():
    with pytest.raises(BadCron, match="either cron"):
        ticks()
    with pytest.raises(BadCron, match="either cron"):
        ticks(cron="0 3 * * *", every="1h")
    with pytest.raises(BadCron, match="takes no time zone"):
        ticks(every="1h", zone="Europe/Berlin")
    with pytest.raises(BadCron, match="takes no anchor"):
        ticks(cron="0 3 * * *", anchor=NOW)
    with pytest.raises(BadCron, match="is no cron expression"):
        ticks(cron=5)
    with pytest.raises(NaiveDatetime, match="has no time zone"):
        ticks(every="1h", anchor=datetime(2026, 1, 1))  # noqa: DTZ001 - the very mistake


@settings(deadline=None)
@given(st.one_of(st.text(max_size=30), st.text(alphabet="0123456789*/,-#L W montuesd@", max_size=30)))
def test_any_text_ticks_or_is_refused(text):
    try:
        spec = ticks(cron=text)
    except BadCron:
        return
    assert next_after(spec, NOW) > NOW


# -- stored form -----------------------------------------------------------------------------------


@given(SPECS | EVERY)
def test_the_stored_form_comes_back(spec):
    import json

    assert Ticks.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_as_text():
    assert str(ticks(cron="@daily", zone="Europe/Berlin")) == "0 0 * * * (Europe/Berlin)"
    assert [str(ticks(every=one)) for one in ("1h", "90s", 10)] == ["every 1 h", "every 90 s", "every 10 s"]
