"""Which error codes are alerts of their own."""

from datetime import UTC, datetime, timedelta

from resilient.core.alerts.codes import MOST_CODES, MOST_SECONDED, MOST_SHARED, OTHER, Codes

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def sort(codes, code, account="a/1", *, at=NOON):
    return codes.classify(code, account, at, DAY)


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


def test_two_accounts_do_not_fill_what_all_share():
    codes = Codes()
    for n in range(MOST_SHARED):
        for account in ("evil/1", "evil/2"):
            sort(codes, f"c{n}", account)
    assert sort(codes, "outage", "good/1") == ("outage", "")
    assert sort(codes, "other outage", "good/2") == ("other outage", "")


def test_many_codes_of_all_accounts_are_soon_shared():
    codes, many = Codes(), [f"c{n}" for n in range(MOST_CODES)]
    for number in range(6):
        for code in many:
            sort(codes, code, f"a/{number}")
    assert [sort(codes, code, "a/new") for code in many] == [(code, "") for code in many]


def test_an_account_can_second_others_again_once_those_codes_are_forgotten():
    codes = Codes()
    for n in range(MOST_SECONDED + 2):
        sort(codes, f"c{n}")
    for n in range(1, MOST_SECONDED + 1):
        assert sort(codes, f"c{n}", "a/2") == (f"c{n}", "")
    assert sort(codes, f"c{MOST_SECONDED + 1}", "a/2") == (f"c{MOST_SECONDED + 1}", "a/2")
    later = NOON + DAY * 1.1
    for code in ("x", "y"):
        sort(codes, code, at=later)
    assert sort(codes, "y", "a/2", at=later) == ("y", "")
