"""Positions in a stream as records write them: read, moved in their own spelling, and compared."""

import time

import pytest

from resilient.core.sync.incremental import instant, later, shifted

NEW_YEAR = 1893456000.0  # 2030-01-01T00:00:00Z


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("99999999999", 99999999999.0),
        ("100000000000", 100000000.0),  # from here on they are milliseconds
        ("-100000000000", -100000000.0),
        ("1893456000000", NEW_YEAR),
        ("1893456000000000", NEW_YEAR),  # microseconds
        ("1893456000000000000", NEW_YEAR),  # nanoseconds
        ("9" * 5000, None),
        ("20300101", 20300101.0),  # digits are a number, also where they could be a date
        ("2030-01-01", NEW_YEAR),
        ("2030-01-01T00:00:00", NEW_YEAR),  # without a zone it is UTC
        ("2030-01-01T00:00:00Z", NEW_YEAR),
        ("2030-01-01T01:00:00+01:00", NEW_YEAR),
    ],
)
def test_the_instant_of_what_a_record_says(value, seconds):
    assert instant(value) == seconds


def test_a_time_without_a_zone_is_in_utc_wherever_the_machine_stands(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert instant("2030-01-01T00:00:00") == NEW_YEAR
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("value", "moved"),
    [
        ("2030-01-01T00:00:00", "2030-01-01T00:00:10"),
        ("2030-01-01 00:00:00", "2030-01-01 00:00:10"),
        ("2030-01-01 00:00:00Z", "2030-01-01 00:00:10Z"),
        ("2030-01-01 00:00:00+0530", "2030-01-01 00:00:10+0530"),
        ("2030-01-01T00:00:00-05:00", "2030-01-01T00:00:10-05:00"),
        ("2030-01-01T00:00:00 +01:00", "2030-01-01T00:00:10+01:00"),
        ("2030-01-01T00:00:00.5", "2030-01-01T00:00:10.500"),
        ("2030-01-01t00:00:00z", "2030-01-01t00:00:10z"),  # RFC 3339, 5.6
        ("2030-01-01t00:00:00.123+01:00", "2030-01-01t00:00:10.123+01:00"),
        ("2030-01-01T00:00:00.123Z", "2030-01-01T00:00:10.123Z"),
        ("2030-01-01T00:00:00.1234Z", "2030-01-01T00:00:10.123400Z"),
        ("2030-01-01T00:00:00.123456+01:00", "2030-01-01T00:00:10.123456+01:00"),
        ("1893456000000001", "1893456010000001"),
        ("1893456000000000001", "1893456010000000001"),  # to the last digit
        ("0001-01-01T00:00:00Z", "0001-01-01T00:00:10Z"),
        ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59Z"),  # there is nothing later
        ("99999999999", "100000000009"),
        ("100000000000", "100000010000"),
        ("100000000000.0", "100000010000.000"),
    ],
)
def test_ten_seconds_later_in_the_same_spelling(value, moved):
    assert shifted(value, 10) == moved


@pytest.mark.parametrize(
    ("value", "other", "comes_later"),
    [
        (None, None, False),
        (None, "1", False),
        ("1", None, True),
        ("10", "9", True),  # as numbers
        ("9", "10", False),
        ("10", "10", False),
        ("100000000000", "99999999999", True),  # numbers of records, which are no milliseconds
        ("1234567890123456789", "1234567890123456788", True),  # a float makes one of them
        ("1234567890123456788", "1234567890123456789", False),
        ("9" * 5000, "1", True),  # as text
        ("2030-01-01T00:30:00+01:00", "2030-01-01T00:00:00Z", False),  # as times
        ("2030-01-01T00:00:00Z", "2030-01-01T00:30:00+01:00", True),
        ("b", "a", True),  # as text
        ("a", "a", False),
        ("a", "b", False),
        ("10", "a", False),  # as text, too, where one is neither
        ("a", "10", True),
    ],
)
def test_which_comes_later(value, other, comes_later):
    assert later(value, other) is comes_later


def test_what_says_never_is_not_before_the_first_day():
    assert shifted("0001-01-01T00:00:00Z", -1.0) == "0001-01-01T00:00:00Z"
    assert shifted("1893456000000000", -1.5) == "1893455998500000"
