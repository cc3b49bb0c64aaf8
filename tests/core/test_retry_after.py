"""When a server wants to be asked again: which field counts, and the waiting rule."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.budgets import BudgetFields
from resilient.core.base.errors import InvalidInput
from resilient.core.base.instants import FAR, Word
from resilient.core.gates.retry_after import WaitDialect, ahead, in_text, resume_at, when

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
EPOCH = int(NOW.timestamp())
SERVER = "Sun, 01 Mar 2026 12:00:00 GMT"


def in_(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


# -- Retry-After -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "30"}, 30),
        ({"retry-after": " 30\t"}, 30),
        ({"RETRY-AFTER": "0030"}, 30),
        ({"Retry-After": "30, 60"}, 60),  # sent twice: the later one
        ({"Retry-After": " 60,30\t"}, 60),
        ({"Retry-After": "Sun, 01 Mar 2026 12:00:45 GMT"}, 45),
        ({"Retry-After": "Sun, 01 Mar 2026 12:00:45 GMT, Sun, 01 Mar 2026 12:00:45 GMT"}, 45),  # a proxy repeats it
        ({"Retry-After": "Sun, 01 Mar 2026 12:01:45 GMT,Sunday, 01-Mar-26 12:00:45 GMT"}, 105),
        ({"Retry-After": "5, Sun, 01 Mar 2026 12:00:45 GMT, Sun Mar  1 12:00:50 2026, 20"}, 50),
        ({"Retry-After": "Sunday, 01-Mar-26 12:00:45 GMT"}, 45),
        ({"Retry-After": "Sun Mar  1 12:00:45 2026"}, 45),
        # the server's clock is ten minutes behind ours
        ({"Retry-After": "Sun, 01 Mar 2026 11:51:00 GMT", "Date": "Sun, 01 Mar 2026 11:50:00 GMT"}, 60),
        # ... or ahead: without the correction this would be an hour too long
        ({"Retry-After": "Sun, 01 Mar 2026 13:01:00 GMT", "Date": "Sun, 01 Mar 2026 13:00:00 GMT"}, 60),
        # out of a cache the Date says nothing about now
        (
            {
                "Retry-After": "Sun, 01 Mar 2026 12:01:00 GMT",
                "Date": "Sun, 01 Mar 2026 11:00:00 GMT",
                "Age": "3600",
            },
            60,
        ),
        ({"retry-after-ms": "1500", "Retry-After": "99"}, 1.5),
        ({"x-ms-retry-after-ms": "2500"}, 2.5),
        ({"retry-after-ms": "garbage", "x-ms-retry-after-ms": "0", "Retry-After": "7"}, 7),
        ({"Retry-After": "garbage", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "20"}, 20),
        (
            {"Retry-After": "5", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "20"},
            5,
        ),  # Retry-After wins
    ],
)
def test_retry_after(headers, seconds):
    found = when(headers, NOW)
    assert found is not None
    assert found == in_(seconds)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "0",
        "-1",
        "-30",
        "+30",
        "1.5",
        "1e3",
        "1_000",
        "nan",
        "inf",
        "Infinity",
        "٣٠",
        "30s",
        "soon",
        "30;",
        "1,",
        "2026-03-01T12:01:00Z",
        "Sun, 01 Mar 2026 12:00:45 AEST",
        "Mon, 01 Mar 2026 12:00:45 GMT",
        SERVER,
        "Sun, 01 Mar 2026 11:59:59 GMT",
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "0, 0",
        "30, soon",
        "Sun, 01 Mar 2026 12:00:45 GMT, soon",
        ", ".join(["30"] * 100),
    ],
)
def test_no_usable_hint(value):
    assert when({"Retry-After": value}, NOW) is None


def test_absurd_values_are_told_as_they_are():
    assert when({"Retry-After": "86401"}, NOW) == in_(86401)
    assert when({"Retry-After": "9" * 400}, NOW) == FAR
    year_out = when({"Retry-After": "Mon, 01 Mar 2027 12:00:00 GMT"}, NOW)
    assert year_out == datetime(2027, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("dialect", "headers", "seconds"),
    [
        (
            WaitDialect(retry_after=Word.DELTA_S_FLOAT),
            {"Retry-After": "0.249"},
            0.249,
        ),  # Graph's batches, Discord
        (WaitDialect(retry_after=Word.ISO8601), {"Retry-After": "2026-03-01T12:01:00Z"}, 60),  # Zoom
        (WaitDialect(retry_after=Word.ISO8601), {"Retry-After": "Sun, 01 Mar 2026 12:00:45 GMT"}, 45),
        (WaitDialect(retry_after=Word.EPOCH_S), {"Retry-After": str(EPOCH + 90)}, 90),
        (WaitDialect(retry_after=Word.AUTO), {"Retry-After": str(EPOCH + 90)}, 90),
        (
            WaitDialect(hints=(("x-ratelimit-reset-after", Word.DELTA_S_FLOAT),)),
            {"X-RateLimit-Reset-After": "2.5"},
            2.5,
        ),
        (
            WaitDialect(hints=(("x-amz-retry-after", Word.DELTA_MS),)),
            {"x-amz-retry-after": "750", "retry-after": "9"},
            0.75,
        ),
        (WaitDialect(hints=(("x-reset", Word.NONE),)), {"x-reset": "750", "retry-after": "9"}, 9),
    ],
)
def test_dialects(dialect, headers, seconds):
    found = when(headers, NOW, dialect)
    assert found is not None
    assert found == in_(seconds)


@pytest.mark.parametrize("name", ["x-reset", "Retry-After"])
@pytest.mark.parametrize("text", [str(EPOCH - 510), f"{EPOCH - 520}, {EPOCH - 510}"])
def test_absolute_times_are_corrected_by_the_date(name, text):
    """The server's clock is ten minutes behind ours; a time that is sent twice is read in Retry-After alone."""
    dialect = WaitDialect(retry_after=Word.EPOCH_S, hints=(("x-reset", Word.EPOCH_S),))
    is_read = name == "Retry-After" or "," not in text
    headers = {name: text, "Date": "Sun, 01 Mar 2026 11:50:00 GMT"}
    assert when(headers, NOW, dialect) == (in_(90) if is_read else None)


def test_numbers_where_a_date_belongs_are_no_hint():
    assert when({"Retry-After": "30, 60"}, NOW, WaitDialect(retry_after=Word.ISO8601)) is None


def test_words_of_a_dialect_are_checked_and_names_of_headers_are_not_case_sensitive():
    assert when({"x-reset": "3"}, NOW, WaitDialect(hints=(("X-Reset", Word.DELTA_S),))) == in_(3)
    for argument, wrong in (("retry_after", {"retry_after": "soon"}), ("hints: X", {"hints": (("X", "soon"),)})):
        with pytest.raises(InvalidInput) as error:
            WaitDialect(**wrong)
        assert str(error.value).startswith(f"WaitDialect({argument}='soon'): {argument} is one of Word.")


# -- budgets as hints ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reset", "word", "seconds"),
    [
        (str(EPOCH + 60), Word.EPOCH_S, 60),
        (f"{EPOCH + 60}000", Word.EPOCH_MS, 60),
        ("60", Word.DELTA_S, 60),
        ("1.5", Word.DELTA_S_FLOAT, 1.5),
        ("1500", Word.DELTA_MS, 1.5),
        ("2026-03-01T12:01:00Z", Word.ISO8601, 60),
        ("6m0s", Word.DURATION, 360),
        ("1h2m", Word.DURATION, 3720),
        ("250ms", Word.DURATION, 0.25),
        (str(EPOCH + 60), Word.AUTO, 60),
        (f"{EPOCH + 60}000", Word.AUTO, 60),
        ("60", Word.AUTO, 60),
        ("2026-03-01T12:01:00Z", Word.AUTO, 60),
    ],
)
def test_reset_of_a_spent_budget(reset, word, seconds):
    fields = BudgetFields("b", remaining="x-ratelimit-remaining", reset="x-ratelimit-reset", word=word)
    dialect = WaitDialect(budgets=(fields,))
    spent = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": reset}
    assert when(spent, NOW, dialect) == in_(seconds)
    assert when({"X-RateLimit-Reset": reset}, NOW, dialect) == in_(seconds)  # no word of what is left
    left = {"X-RateLimit-Remaining": "40", "X-RateLimit-Reset": reset}
    assert when(left, NOW, dialect) is None  # a refusal for another reason: GitHub's 403
    assert when(left, NOW, dialect, cost=41) == in_(seconds)


def test_the_latest_of_the_spent_budgets_counts():
    headers = {"RateLimit": '"second";r=0;t=1, "hour";r=0;t=1800, "day";r=500;t=40000'}
    assert when(headers, NOW) == in_(1800)


def test_a_spent_budget_without_a_reset_waits_for_its_window():
    daily = BudgetFields("daily", remaining="x-left", window=10.0)
    assert when({"x-left": "0"}, NOW, WaitDialect(budgets=(daily,))) == in_(10)
    assert when({"x-left": "1"}, NOW, WaitDialect(budgets=(daily,))) is None


def test_a_reset_in_the_past_is_no_hint():
    assert when({"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(EPOCH - 1)}, NOW) is None
    assert when({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "0"}, NOW) is None


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("User-rate limit exceeded.  Retry after 2026-03-01T12:00:09.123Z", 9.123),
        ("Retry after 2026-03-01T13:00:09+01:00 (Mail sending)", 9),
        ("Rate limit reached. Please try again in 6ms. Visit our page", 0.006),
        ("Rate limit reached. Please try again in 1m2.5s.", 62.5),
        ("try again in 20 seconds", 20),
        ("Please RETRY AFTER 1.5 minutes", 90),
        ("please wait 2 hours", 7200),
        ("retry in 90 secs", 90),
        ("try again in 500 milliseconds", 0.5),
        ("retry after: 30s", 30),
        ("Try again in 1H2M", 3720),
        ("retry after 2026-03-01t12:00:09z", 9),
    ],
)
def test_time_in_a_message(text, seconds):
    assert in_text(text, NOW) == in_(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Rate limit exceeded",
        "try again in 5 messages",
        "retry after lunch",
        "try again in 0 seconds",
        "retry 3",
        "Retry after 2026-03-01T11:00:00Z",
        "Retry after 2026-03-01T12:00:09",
        "try again in ٣ seconds",
        " " * 5000 + "try again in 20 seconds",
        "Retry after 2026-13-01T12:00:09Z",
    ],
)
def test_no_time_in_a_message(text):
    assert in_text(text, NOW) is None


def test_a_providers_own_pattern():
    named = re.compile(r"backoff=(?P<value>\d+)")
    assert in_text('{"msg": "backoff=1500"}', NOW, named, Word.DELTA_MS) == in_(1.5)
    assert in_text("again at 2026-03-01T12:01:00Z!", NOW, re.compile(r"again at (\S+)!"), Word.ISO8601) == in_(60)
    assert in_text("42", NOW, re.compile(r"\d+"), Word.DELTA_S) == in_(42)
    assert in_text("none", NOW, named) is None
    assert in_text("app: 42", NOW, re.compile(r"(\w+): (?P<value>\d+)"), Word.DELTA_S) == in_(42)


# -- the waiting rule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "roll", "expected"),
    [
        (10, 0.0, 11.0),
        (10, 0.5, 11.5),
        (10, 1.0, 12.0),
        (200, 1.0, 221.0),
        (300, 1.0, 331.0),
        (86400, 1.0, 86431.0),  # at most 30 s of jitter
        (0, 0.9, 1.0),
        (-50, 0.9, 1.0),
    ],
)
def test_resume(wait, roll, expected):
    assert resume_at(in_(wait), NOW, roll) == in_(expected)
    assert resume_at(in_(wait), NOW, roll) == in_(expected)


def test_resume_saturates():
    assert resume_at(FAR, NOW, 0.5) == FAR


SPAN = (datetime(2000, 1, 1), datetime(9998, 1, 1))  # noqa: DTZ001 - Hypothesis adds the zone
MOMENTS = st.datetimes(*SPAN, timezones=st.just(UTC))


@given(MOMENTS, MOMENTS, st.floats(0, 1, exclude_max=True))
def test_nobody_is_ever_early(at, now, roll):
    resumed = resume_at(at, now, roll)
    assert resumed >= max(at, now) + timedelta(seconds=1)
    assert resumed <= max(at, now) + timedelta(seconds=31)


@given(st.integers(1, 10**12))
def test_seconds_are_never_cut(seconds):
    found = when({"Retry-After": str(seconds)}, NOW)
    assert found is not None
    assert found == (in_(seconds) if seconds < (FAR - NOW).total_seconds() else FAR)


@given(
    st.integers(1, 10**7),
    st.timedeltas(timedelta(days=-3000), timedelta(days=3000)),
    st.floats(0, 1, exclude_max=True),
)
def test_http_dates_survive_any_skew(wait, skew, roll):
    """Whatever the server's clock shows, the wait it meant is the wait we keep."""
    from email.utils import format_datetime

    theirs = (NOW + skew).replace(microsecond=0)
    headers = {
        "Date": format_datetime(theirs, usegmt=True),
        "Retry-After": format_datetime(theirs + timedelta(seconds=wait), usegmt=True),
    }
    found = when(headers, NOW)
    assert found is not None
    assert found == in_(wait)
    assert resume_at(found, NOW, roll) > in_(wait)


NAMES = ["retry-after", "Retry-After", "retry-after-ms", "x-ms-retry-after-ms", "Date", "Age", "RateLimit"]
NAMES += ["RateLimit-Policy", "x-ratelimit-reset", "x-ratelimit-remaining", "ratelimit-reset", "x-own"]
LIKELY = st.text(alphabet='0123456789.-+:TZ ,dhmsuGMTSunaMr26;="r', max_size=40)
DIALECTS = st.builds(
    WaitDialect,
    retry_after=st.sampled_from(Word),
    hints=st.lists(st.tuples(st.just("x-own"), st.sampled_from(Word)), max_size=1).map(tuple),
)


@given(st.dictionaries(st.sampled_from(NAMES), st.one_of(st.text(max_size=80), LIKELY)), DIALECTS)
def test_any_header_text_gives_a_future_time_or_none(headers, dialect):
    found = when(headers, NOW, dialect)
    if found is not None:
        assert NOW < found <= FAR


@given(st.text(max_size=200))
def test_any_message_gives_a_future_time_or_none(text):
    for message in (text, f"Retry after {text}", f"try again in {text}"):
        found = in_text(message, NOW)
        assert found is None or found > NOW


def test_what_is_ahead():
    assert ahead(None, NOW) is None
    assert ahead(NOW, NOW) is None
    assert ahead(in_(1), NOW) == in_(1)
