"""Which error codes are alerts of their own."""

from datetime import UTC, datetime, timedelta

from resilient.core.alerts.codes import MOST_CODES, MOST_SHARED, OTHER, Codes

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def sort(codes, code, account="a/1", *, at=NOON):
    return codes.sort(code, account, at, DAY)


def test_an_account_brings_one_code_that_all_share():
    codes = Codes()
    assert sort(codes, "x") == ("x", "")
    assert sort(codes, "y") == ("y", "a/1")
    assert sort(codes, "y", "a/2") == ("y", "")  # two have it
    assert sort(codes, "y") == ("y", "")
    assert sort(codes, "z", "a/2") == ("z", "")


def test_no_code_is_no_share():
    codes = Codes()
    assert sort(codes, "") == ("", "")
    assert sort(codes, "x") == ("x", "")


def test_too_many_of_one_account_are_its_other_ones():
    codes = Codes()
    for n in range(MOST_CODES + 1):
        assert sort(codes, f"c{n}")[0] == f"c{n}"
    assert sort(codes, "more") == (OTHER, "a/1")
    assert sort(codes, "c0") == ("c0", "")
    assert sort(codes, "more", "a/2") == ("more", "")


def test_too_many_of_all_accounts():
    codes = Codes()
    for n in range(MOST_SHARED):
        assert sort(codes, f"c{n}", f"a/{n}") == (f"c{n}", "")
    assert sort(codes, "more", "a/new") == (OTHER, "")
    assert sort(codes, "c7", "a/new") == ("c7", "")


def test_codes_age():
    codes = Codes()
    for n in range(MOST_CODES + 1):
        sort(codes, f"c{n}")
    sort(codes, "c1", at=NOON + DAY / 2)
    later = NOON + DAY * 1.1
    assert sort(codes, "more", at=later) == ("more", "")  # its share is free again
    assert sort(codes, "c1", at=later) == ("c1", "a/1")
    assert sort(codes, "c2", at=later) == ("c2", "a/1")
