"""Reading one moment out of text: every dialect word, and what is no moment at all."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.instants import FAR, Word, add_seconds, duration, http_date, iso8601, number, read

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
EPOCH = int(NOW.timestamp())


def in_(**kwargs: float) -> datetime:
    return NOW + timedelta(**kwargs)


@pytest.mark.parametrize(
    ("value", "word", "expected"),
    [
        ("30", Word.DELTA_S, in_(seconds=30)),
        (" \t30 ", Word.DELTA_S, in_(seconds=30)),
        ("007", Word.DELTA_S, in_(seconds=7)),
        ("0", Word.DELTA_S, NOW),
        (30, Word.DELTA_S, in_(seconds=30)),
        (30.0, Word.DELTA_S, in_(seconds=30)),
        (0, Word.DELTA_S, NOW),
        (0.0, Word.DELTA_S, NOW),
        ("9" * 5000, Word.DELTA_S, FAR),
        (10**30, Word.DELTA_S, FAR),
        ("0.249", Word.DELTA_S_FLOAT, in_(milliseconds=249)),
        ("1.0000001", Word.DELTA_S_FLOAT, in_(seconds=1, microseconds=1)),  # rounded up: a hint is a floor
        ("1." + "0" * 30 + "1", Word.DELTA_S_FLOAT, in_(seconds=1, microseconds=1)),
        ("1." + "0" * 18 + "1", Word.DELTA_S_FLOAT, in_(seconds=1, microseconds=1)),
        ("1." + "0" * 30, Word.DELTA_S_FLOAT, in_(seconds=1)),
        ("0." + "0" * 6 + "9" * 12 + "1", Word.DELTA_S_FLOAT, in_(microseconds=1)),
        ("0" * 20 + "5", Word.DELTA_S, in_(seconds=5)),
        ("1500", Word.DELTA_MS, in_(seconds=1.5)),
        ("1500.5", Word.DELTA_MS, in_(microseconds=1_500_500)),
        (str(EPOCH + 60), Word.EPOCH_S, in_(seconds=60)),
        (str(EPOCH - 60), Word.EPOCH_S, in_(seconds=-60)),
        (f"{EPOCH}.5", Word.EPOCH_S_FLOAT, in_(seconds=0.5)),
        (f"{EPOCH}250", Word.EPOCH_MS, in_(milliseconds=250)),
        ("2026-03-01T12:01:00Z", Word.ISO8601, in_(minutes=1)),
        ("2026-03-01T13:01:00+01:00", Word.ISO8601, in_(minutes=1)),
        ("2026-03-01T07:31:00-0430", Word.ISO8601, in_(minutes=1)),
        ("2026-03-02T11:59:00+23:59", Word.ISO8601, NOW),
        ("2026-03-01T12:01Z", Word.ISO8601, in_(minutes=1)),  # Atlassian: minutes only
        ("2026-03-01t12:00:00.123456789z", Word.ISO8601, in_(microseconds=123_457)),
        ("2026-03-01T12:00:00.999999Z", Word.ISO8601, in_(microseconds=999_999)),
        ("Sun, 01 Mar 2026 12:00:10 GMT", Word.HTTP_DATE, in_(seconds=10)),
        ("Sunday, 01-Mar-26 12:00:10 GMT", Word.HTTP_DATE, in_(seconds=10)),
        ("6m0s", Word.DURATION, in_(minutes=6)),
        ("1h2m", Word.DURATION, in_(hours=1, minutes=2)),
        ("250ms", Word.DURATION, in_(milliseconds=250)),
        ("1m2.5s", Word.DURATION, in_(seconds=62.5)),
        ("2d", Word.DURATION, in_(days=2)),
        ("500us", Word.DURATION, in_(microseconds=500)),
        ("30", Word.AUTO, in_(seconds=30)),
        ("0.5", Word.AUTO, in_(seconds=0.5)),
        ("999999999", Word.AUTO, in_(seconds=999_999_999)),
        ("1000000000", Word.AUTO, datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)),
        ("999999999999", Word.AUTO, FAR),
        ("1000000000000", Word.AUTO, datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)),
        (str(EPOCH + 5), Word.AUTO, in_(seconds=5)),
        (f"{EPOCH + 5}.25", Word.AUTO, in_(seconds=5.25)),
        (f"{EPOCH + 5}000", Word.AUTO, in_(seconds=5)),
        ("2026-03-01T12:01:00Z", Word.AUTO, in_(minutes=1)),  # not the year 2026 read as seconds
        ("Sun, 01 Mar 2026 12:00:10 GMT", Word.AUTO, in_(seconds=10)),
        ("Sunday, 01-Mar-26 12:00:10 GMT", Word.AUTO, in_(seconds=10)),
        ("6m0s", Word.AUTO, in_(minutes=6)),
    ],
)
def test_moments(value, word, expected):
    assert read(value, word, NOW) == expected


@pytest.mark.parametrize(
    ("value", "word"),
    [
        *[
            (v, Word.DELTA_S)
            for v in (
                "",
                " ",
                "-1",
                "+1",
                "1.5",
                "1e3",
                "1_0",
                "nan",
                "inf",
                "٣٠",
                "\uff13\uff10",
                "0x1e",
                "30s",
            )
        ],
        *[(v, Word.DELTA_S_FLOAT) for v in ("nan", "inf", "1e3", ".5", "5.", "1,5", "-0.5")],
        *[(v, Word.DELTA_S) for v in (None, True, -1, -0.5, float("nan"), float("inf"), [], {}, b"30")],
        *[
            (v, Word.ISO8601)
            for v in ("2026-03-01T12:01:00", "2026-02-30T12:00:00Z", "2026-03-01", "2026-03-01T24:00:00Z")
        ],
        *[
            (v, Word.ISO8601)
            for v in ("2026-03-01T12:00:00+24:00", "2026-03-01T12:00:00+01:60", "0000-01-01T00:00:00Z")
        ],
        *[(v, Word.DURATION) for v in ("", "5", "m", "1.2.3s", "1s2m", "5 messages", "-5s", "1h" * 60)],
        *[(v, Word.AUTO) for v in ("soon", "-1", "1e9", "٣٠")],
        ("30", Word.NONE),
        (f"{EPOCH}.5", Word.EPOCH_S),
    ],
)
def test_garbage_is_none_never_zero(value, word):
    assert read(value, word, NOW) is None


def test_skew_moves_absolute_moments_only():
    ahead = timedelta(minutes=5)  # our clock is five minutes ahead of the server's
    assert read(str(EPOCH), Word.EPOCH_S, NOW, ahead) == in_(minutes=5)
    assert read("Sun, 01 Mar 2026 12:00:00 GMT", Word.HTTP_DATE, NOW, ahead) == in_(minutes=5)
    assert read("2026-03-01T12:00:00Z", Word.ISO8601, NOW, ahead) == in_(minutes=5)
    assert read(str(EPOCH), Word.AUTO, NOW, ahead) == in_(minutes=5)
    assert read("2026-03-01T12:00:00Z", Word.AUTO, NOW, ahead) == in_(minutes=5)
    for text in ("30", "30s"):
        assert read(text, Word.AUTO, NOW, ahead) == in_(seconds=30)
    assert read("30", Word.DELTA_S, NOW, ahead) == in_(seconds=30)


TEXTS = {
    number: "30",
    duration: "30s",
    iso8601: "2026-03-01T12:00:00Z",
    lambda text: http_date(text, NOW): "Sunday, 01-Mar-26 12:00:00 GMT",
    lambda text: read(text, Word.DELTA_S, NOW): "30",
}


@pytest.mark.parametrize(("parse", "text"), TEXTS.items())
def test_blanks_and_tabs_around_it_are_no_part_of_a_text(parse, text):
    assert parse(f" \t{text}\t ") == parse(text) is not None
    for other in ("\n", "\r", "\x0c", "\xa0", "\u3000", "X"):
        assert parse(text + other) is parse(other + text) is None


@pytest.mark.parametrize(
    ("parse", "text", "last", "expected"),
    [
        (number, "0" * 62, "7", 7.0),
        (duration, "0" * 62, "s", 0),
        (iso8601, "2026-03-01T12:00:00." + "0" * 42, "0Z", NOW),
    ],
)
def test_a_text_of_sixty_four_characters_is_read_and_a_longer_one_is_not(parse, text, last, expected):
    longest = text[: 64 - len(last)].ljust(64 - len(last), "0") + last
    assert len(longest) == 64
    assert parse(longest) == expected
    assert parse(longest[: -len(last)] + "0" + last) is None


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("", None),
        (" ", None),
        ("0s", 0),
        ("1d1h1m1s1ms1us", 90_061_001_001),
        ("9" * 15 + "us", 10**15 - 1),
        ("9" * 16 + "us", 10**18),  # thirty thousand years: more than any wait
    ],
)
def test_a_duration_is_counted_in_microseconds(text, micros):
    assert duration(text) == micros


EARLIEST = datetime.min.replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("at", "seconds", "moment"),
    [
        (NOW, 1.5, in_(seconds=1.5)),
        (NOW, -1.5, in_(seconds=-1.5)),
        (NOW, 1e300, FAR),
        (NOW, -1e300, EARLIEST),
        (datetime.max.replace(tzinfo=UTC), 1, FAR),
        (EARLIEST, -1, EARLIEST),
    ],
)
def test_beyond_the_calendar_stands_its_end(at, seconds, moment):
    assert add_seconds(at, seconds) == moment


def test_a_moment_before_the_calendar_is_its_beginning():
    assert iso8601("0001-01-01T00:00:00+23:59") == EARLIEST
    assert read("0001-01-01T00:00:00Z", Word.ISO8601, NOW, timedelta(days=-1)) == EARLIEST
    assert read("9999-12-31T00:00:00Z", Word.ISO8601, NOW, timedelta(days=1)) == FAR


# -- HTTP-date (RFC 9110, 5.6.7) -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 08:49:37 UTC",
        "Sunday, 06-Nov-94 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994",
        "Sun Nov 06 08:49:37 1994",
    ],
)
def test_the_three_forms(text):
    assert http_date(text, NOW) == datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "Sun, 06 Nov 1994 08:49:37 AEST",  # email.utils reads this as UTC
        "Sun, 06 Nov 1994 08:49:37 +0000",
        "Sun, 06 Nov 1994 08:49:37",
        "Mon, 06 Nov 1994 08:49:37 GMT",  # it was a Sunday
        "Sun, 32 Nov 1994 08:49:37 GMT",
        "Thu, 31 Nov 1994 08:49:37 GMT",
        "Sun, 00 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 24:00:00 GMT",
        "Sun, 06 Nov 1994 08:60:00 GMT",
        "Sun, 06 Nov 1994 08:49:61 GMT",
        "Sun, 6 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 94 08:49:37 GMT",
        "Sun, 06 Nov 199400 08:49:37 GMT",
        "Sun, 06 Xov 1994 08:49:37 GMT",
        "06 Nov 1994 08:49:37 GMT",
        "Sun, 06 Nov 1994 ٠٨:49:37 GMT",
        "Saturday, 06-Nov-94 08:49:37 GMT",
        "Sun, 06 Nov 0000 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994 GMT",
    ],
)
def test_dates_that_are_none(text):
    assert http_date(text, NOW) is None


@pytest.mark.parametrize(
    ("text", "year"),
    [
        ("Tuesday, 01-Jan-69 00:00:00 GMT", 2069),  # 43 years ahead; email.utils says 1969
        ("Sunday, 01-Mar-76 12:00:00 GMT", 2076),  # exactly 50 years ahead
        ("Monday, 01-Mar-76 12:00:01 GMT", 1976),  # more than 50 years ahead: the latest in the past
        ("Friday, 01-Jan-99 00:00:00 GMT", 1999),
        ("Thursday, 01-Jan-26 00:00:00 GMT", 2026),
    ],
)
def test_fifty_year_rule(text, year):
    at = http_date(text, NOW)
    assert at is not None
    assert at.year == year


def test_fifty_year_rule_across_the_century():
    late = datetime(2085, 1, 1, tzinfo=UTC)
    assert http_date("Wednesday, 01-Jan-10 00:00:00 GMT", late) == datetime(2110, 1, 1, tzinfo=UTC)
    assert http_date("Friday, 01-Jan-10 00:00:00 GMT", late) is None  # a Friday in 2010, long past


@pytest.mark.parametrize(
    "text", ["Sat, 31 Dec 2016 23:59:60 GMT", "Saturday, 31-Dec-16 23:59:60 GMT", "2016-12-31T23:59:60Z"]
)
def test_leap_second_is_the_next_start(text):
    assert read(text, Word.AUTO, NOW) == datetime(2017, 1, 1, tzinfo=UTC)


SPAN = (datetime(1900, 1, 1), datetime(9998, 1, 1))  # noqa: DTZ001 - Hypothesis adds the zone


@given(st.datetimes(*SPAN, timezones=st.just(UTC)))
def test_every_date_is_read_back(at):
    at = at.replace(microsecond=0)
    from email.utils import format_datetime

    assert http_date(format_datetime(at, usegmt=True), NOW) == at
    assert iso8601(at.isoformat()) == at
    assert read(at.isoformat(), Word.ISO8601, NOW) == min(at, FAR)


# -- anything at all -------------------------------------------------------------------------------

LIKELY = st.text(alphabet="0123456789.-+:TZ ,dhmsuGMTSunov/;=\"'eE_٣µ", max_size=40)
TEXT = st.one_of(st.text(max_size=80), LIKELY)


@given(TEXT, st.sampled_from(Word), st.timedeltas())
def test_reading_never_raises(text, word, skew):
    at = read(text, word, NOW, skew)
    assert at is None or at <= FAR
    assert number(text) is None or number(text) >= 0
    duration(text)


@given(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.lists(st.integers())),
    st.sampled_from(Word),
)
def test_reading_json_values_never_raises(value, word):
    read(value, word, NOW)


@given(st.integers(0, 10**7), st.integers(0, 10**9 - 1))
def test_a_relative_wait_is_never_shorter_than_stated(whole, nanos):
    at = read(f"{whole}.{nanos:09d}", Word.DELTA_S_FLOAT, NOW)
    waited = (at - NOW) // timedelta(microseconds=1) * 1000
    assert 0 <= waited - (whole * 10**9 + nanos) < 1000


@given(st.floats(allow_nan=False))
def test_adding_seconds_saturates(seconds):
    assert add_seconds(NOW, seconds) <= FAR
