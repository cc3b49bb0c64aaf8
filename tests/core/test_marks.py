"""Marks of requests whose outcome nobody knows: how long each may be repeated, and what a person is told."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.exchange import RequestFacts
from resilient.core.jobs import marks

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
HOUR = 3600.0
AT = "2026-03-01T12:00:00.000+00:00"
FORGETS = "the provider remembers its key only until 2026-03-01 12:30:00 UTC"


def request(key=None, life=None, *, of_grant=False, body_hash="ab12"):
    return RequestFacts(
        "POST", "https://p.example/x", "p.example", "/x", name="POST /x 1", needs_mark=key is None,
        idempotency_key=key, key_life=life, key_of_grant=of_grant, body_hash=body_hash,
    )  # fmt: skip


def in_(seconds):
    return NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (request(), {"hash": "ab12", "at": AT}),
        (request(body_hash=None), {"hash": None, "at": AT}),
        (request("k"), {"hash": "ab12", "at": AT}),
        (
            request("k", life=HOUR),
            {"hash": "ab12", "at": AT, "key": "k", "until": "2026-03-01T12:59:00.000+00:00"},
        ),
        (
            request("k", life=100.0),
            {"hash": "ab12", "at": AT, "key": "k", "until": "2026-03-01T12:01:30.000+00:00"},
        ),
        (
            request("k", of_grant=True),
            {"hash": "ab12", "at": AT, "key": "k",
             "until": "9999-12-31T23:59:59.999+00:00", "grant": "g1"},
        ),
        (
            request("k", life=HOUR, of_grant=True),
            {"hash": "ab12", "at": AT, "key": "k",
             "until": "2026-03-01T12:59:00.000+00:00", "grant": "g1"},
        ),
        (request(None, life=HOUR), {"hash": "ab12", "at": AT}),
    ],
)  # fmt: skip
def test_what_is_kept_of_a_request(asked, expected):
    assert marks.made(asked, NOW, "g1") == expected


def test_a_key_that_dies_with_its_grant_is_forgotten_by_the_next_one():
    mark = marks.made(request("k", of_grant=True), NOW, "g1")
    assert marks.under(mark, "g1", in_(5)) == mark
    assert marks.under(mark, "g1", in_(5)) is not mark
    anew = marks.under(mark, "g2", in_(5))
    assert anew == {**mark, "until": "2026-03-01T12:00:05.000+00:00", "ended": "grant"}
    assert not marks.in_doubt({"r": mark}, in_(5))
    assert marks.in_doubt({"r": anew}, in_(5))
    assert marks.forgotten({"r": anew}, in_(6)) == (
        "r was first sent at 2026-03-01 12:00:00 UTC, and its account was connected anew since,"
        " which the provider's memory of its key does not outlive"
    )


def test_a_key_of_no_grant_outlives_every_grant():
    mark = marks.made(request("k", life=HOUR), NOW)
    assert "grant" not in mark
    assert marks.under(mark, "g2", in_(5)) == mark


def test_a_request_under_no_grant_yet_is_bound_to_none():
    mark = marks.made(request("k", of_grant=True), NOW)
    assert mark["grant"] == ""
    assert marks.under(mark, "g1", NOW)["ended"] == "grant"


KEYED = {"at": "2026-03-01T11:00:00+00:00", "key": "k", "until": "2026-03-01T12:30:00+00:00"}
LATER = {"at": "2026-03-01T11:00:00+00:00", "key": "l", "until": "2026-03-01T13:00:00+00:00"}
BARE = {"at": "2026-03-01T11:00:00+00:00", "hash": None}


@pytest.mark.parametrize(
    ("stored", "now", "in_doubt", "unkeyed", "safe_until"),
    [
        (None, NOW, False, False, None),
        ({}, NOW, False, False, None),
        ({"a": KEYED}, NOW, False, False, in_(1800)),
        ({"a": KEYED}, in_(1799.9), False, False, in_(1800)),
        ({"a": KEYED}, in_(1800), True, False, in_(1800)),
        ({"a": LATER, "b": KEYED}, NOW, False, False, in_(1800)),
        ({"a": LATER, "b": KEYED}, in_(1800), True, False, in_(1800)),
        ({"a": BARE}, NOW, True, True, None),
        ({"a": KEYED, "b": BARE}, NOW, True, True, in_(1800)),
        ({"a": {**KEYED, "until": "soon"}}, NOW, True, True, None),
        ({"a": {**KEYED, "until": 5}}, NOW, True, True, None),
        ("nonsense", NOW, True, True, None),
        (["a"], NOW, True, True, None),
        ({"a": "text"}, NOW, True, True, None),
        ({"a": KEYED, "b": 7}, NOW, True, True, None),
    ],
)
def test_until_when_what_was_sent_may_be_repeated(stored, now, in_doubt, unkeyed, safe_until):
    assert marks.in_doubt(stored, now) is in_doubt
    assert marks.unkeyed(stored) is unkeyed
    assert marks.safe_until(stored) == safe_until


def test_a_time_without_a_zone_in_a_row_is_none():
    stored = {"POST /x #1": {"key": "k", "until": "2027-01-01T00:00:00"}}
    assert marks.in_doubt(stored, NOW)
    assert marks.unkeyed(stored)


def test_what_cannot_be_read_is_one_mark_without_a_key():
    assert marks.readable("nonsense") == {"unreadable mark": {}}
    assert marks.readable(None) == {}
    assert marks.readable({"a": KEYED}) == {"a": KEYED}


def test_a_person_is_told_of_every_key_that_is_too_old():
    stored = {"b": KEYED, "a": {**KEYED, "at": "?"}, "c": LATER, "d": BARE}
    assert marks.forgotten(stored, in_(1799)) == ""
    assert marks.forgotten(stored, in_(1800)) == (
        f"a was first sent at a time nobody knows, and {FORGETS}; "
        f"b was first sent at 2026-03-01 11:00:00 UTC, and {FORGETS}"
    )


@given(st.floats(1, 10 * 365 * 86_400), st.floats(0, 1e6))
def test_a_repeat_comes_before_the_provider_forgets(life, later):
    mark = marks.made(request("k", life=life), NOW)
    until, at = marks.until_of(mark), in_(later)
    assert until > NOW
    assert until + timedelta(seconds=min(60, life / 10)) <= in_(life) + timedelta(milliseconds=1)
    assert marks.in_doubt({"r": mark}, at) == (at >= until)
    assert bool(marks.forgotten({"r": mark}, at)) == (at >= until)
