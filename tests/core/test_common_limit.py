"""Whose throttles show a limit of the application: any accounts by turns do, the same few of a tenant do not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.gates import retry_after
from resilient.core.gates.retry_after import (
    BURST,
    FEW,
    HOUR,
    LEAST,
    LONGEST_WAIT,
    LONGEST_WAIT_OF_FEW,
    REPEAT,
    CommonLimit,
)


def names(number, kind="good"):
    return [f"p/{kind}{n}" for n in range(number)]


def together(rule, accounts, at, *, wait=1.0, has_limit=False):
    """Throttle these within a second; what the last one shows."""
    answers = [rule.throttled(name, at + n / 100, wait, has_limit=has_limit) for n, name in enumerate(accounts)]
    return answers[-1] or []


def passing(accounts, at=0.0):
    rule = CommonLimit()
    for name in accounts:
        rule.passed(name, at)
    return rule


def test_five_accounts_and_no_fewer_than_are_let_through_are_a_common_limit():
    assert together(passing([]), names(LEAST), 0.0) == names(LEAST)
    assert together(passing([]), names(LEAST - 1), 0.0) == []
    assert together(passing(names(LEAST, "well")), names(LEAST), 0.1) == names(LEAST)
    assert together(passing(names(LEAST + 1, "well")), names(LEAST), 0.1) == []
    assert together(passing(names(LEAST + 1, "well"), -BURST), names(LEAST), 0.1) == names(LEAST), "that is long ago"
    assert together(passing(names(LEAST)), names(LEAST), 0.1) == names(LEAST), "those were throttled since"


def test_near_a_limit_that_is_known_three_votes_are_enough():
    rule = passing(names(50, "well"))
    assert together(rule, names(FEW - 1), 1.0, has_limit=True) == []
    assert rule.throttled("p/third", 1.5, None, has_limit=True) == [*names(FEW - 1), "p/third"]


@pytest.mark.parametrize(
    ("has_limit", "accounts", "wait", "answer"),
    [
        (False, LEAST, LONGEST_WAIT, True),
        (False, LEAST, LONGEST_WAIT + 1, False),
        (True, FEW, LONGEST_WAIT_OF_FEW, True),
        (True, FEW, LONGEST_WAIT_OF_FEW + 1, False),
        (True, LEAST, LONGEST_WAIT, True),
    ],
)
def test_a_long_wait_is_an_accounts_own(has_limit, accounts, wait, answer):
    assert bool(together(passing([]), names(accounts), 0.0, wait=wait, has_limit=has_limit)) is answer


def test_throttles_that_are_not_within_moments_are_no_event():
    rule = CommonLimit()
    assert not any(rule.throttled(name, n * BURST, 1.0, has_limit=True) for n, name in enumerate(names(9)))


def test_a_burst_and_an_hour_are_over_in_their_last_moment():
    rule = CommonLimit()
    assert [rule.throttled(name, 0.0, 1.0, has_limit=True) for name in names(FEW - 1)] == [[]] * (FEW - 1)
    assert rule.throttled("p/late", BURST, 1.0, has_limit=True) == []  # their votes are gone
    rule = passing(names(LEAST + 1, "well"), 0.0)
    answers = [rule.throttled(name, BURST, 1.0, has_limit=False) for name in names(LEAST)]
    assert answers[-1] == names(LEAST)
    rule = CommonLimit()
    rule.throttled("p/before", 0.0, LONGEST_WAIT, has_limit=False)
    assert [rule.throttled(name, BURST, 1.0, has_limit=True) for name in names(FEW)][-1] == names(FEW)


def test_who_is_let_through_again_goes_on():
    rule = passing(names(LEAST + 2, "well"))
    for name in names(LEAST + 1, "well"):
        rule.passed(name, 10.0)
    assert together(rule, names(LEAST), 10.1) == []


def test_who_was_let_through_after_a_throttle_goes_on():
    rule = CommonLimit()
    for name in names(LEAST + 1, "well"):
        rule.throttled(name, 0.0, 1.0, has_limit=False)
        rule.passed(name, 10.0)
    assert together(rule, names(LEAST), 10.1) == []
    for name in names(LEAST + 1, "well"):
        rule.throttled(name, 10.3, 1.0, has_limit=False)
    rule.passed("p/well0", 10.3)
    assert rule._passing(10.3) == 0, "in the same moment says nothing"


def test_who_is_throttled_again_after_a_while_votes_again():
    rule = CommonLimit()
    assert [rule.throttled("p/a", n * REPEAT, 1.0, has_limit=True) for n in range(3)] == [[], [], []]
    assert rule.throttled("p/a", 2.9 * REPEAT, 1.0, has_limit=True) is None


@pytest.mark.parametrize(
    ("well", "refused", "has_vote"),
    [(0, 0, True), (1, 1, True), (2, 2, True), (2, 1, False), (1, 0, False), (3, 2, False), (2, 3, True)],
)
@pytest.mark.parametrize("works", [False, True])
def test_who_was_throttled_more_often_than_half_of_the_others_has_no_vote(well, refused, has_vote, works):
    """Whether its own requests are let through in between or not: it is none of the others."""
    rule = passing(names(well, "well"), 1.0)
    for name in [*names(refused), "p/me"]:
        rule.throttled(name, 10.0, LONGEST_WAIT, has_limit=True)
    if works:
        rule.passed("p/me", 50.0)
    assert (rule.throttled("p/me", 100.0, 1.0, has_limit=True) == []) is has_vote


@pytest.mark.parametrize(("later", "has_vote"), [(HOUR - 1, False), (HOUR, True)])
def test_who_was_not_at_work_for_an_hour_is_none_of_the_others(later, has_vote):
    for begin in (
        lambda rule: rule.passed("p/other", 0.0),
        lambda rule: rule.throttled("p/other", 0.0, 1.0, has_limit=False),
    ):
        rule = CommonLimit()
        begin(rule)
        for at in (1800.0, 1900.0):
            rule.throttled("p/me", at, 1.0, has_limit=True)
        assert (rule.throttled("p/me", later, 1.0, has_limit=True) == []) is has_vote


def test_an_account_that_is_throttled_again_and_again_has_one_vote():
    rule = CommonLimit()
    for at in range(200):
        assert together(rule, names(FEW - 1, "evil"), at * 2.0, has_limit=True) == []


@pytest.mark.parametrize("evil", [FEW, LEAST, 19])
@pytest.mark.parametrize("every", [BURST + 1, REPEAT + 1, 100.0])
@pytest.mark.parametrize("has_limit", [True, False])
def test_a_minority_has_one_vote_each_however_long_it_goes_on(evil, every, has_limit):
    """However one tenant times his throttles, together or in groups: twenty good accounts work beside him."""
    rule, at, events = CommonLimit(), 0.0, []
    while at < 5 * HOUR:
        for name in names(20):
            rule.passed(name, at)
        if together(rule, names(evil, "evil"), at + 0.5, has_limit=has_limit):
            events.append(at)
        at += every
    assert len(events) <= (1 if has_limit else evil // LEAST)


def test_groups_of_three_of_his_accounts_have_no_more_votes():
    rule, events = CommonLimit(), 0
    for turn in range(int(2 * HOUR / 31)):
        for name in names(20):
            rule.passed(name, turn * 31.0)
        group = names(9, "evil")[turn % 3 * 3 :][:3]
        events += bool(together(rule, group, turn * 31.0 + 1, has_limit=True))
    assert events == 3, "each group once: there was no hour without a throttle of theirs"


@pytest.mark.parametrize(("accounts", "refused", "share"), [(6, 4, 0.4), (50, 5, 0.7), (400, 5, 0.9)])
def test_a_limit_of_all_keeps_its_votes_for_hours(accounts, refused, share):
    """Each minute a few are refused, whichever come at the wrong moment."""
    rule, rng, events = CommonLimit(), random.Random(1), 0
    for minute in range(240):
        for name in names(accounts):
            rule.passed(name, minute * 60.0)
        events += bool(together(rule, rng.sample(names(accounts), refused), minute * 60.0 + 30, has_limit=True))
    assert events >= share * 240


def test_where_a_limit_is_known_one_throttle_says_nothing_about_its_account():
    """It may have been meant for all. If it is thrown again while others go on, it is its own."""
    rule = passing(names(50, "well"))
    assert rule.throttled("p/a", 0.0, 1.0, has_limit=True) == []
    assert rule.throttled("p/a", 2.0, 1.0, has_limit=True) == [], "the same event"
    assert rule.throttled("p/a", 20.0, 1.0, has_limit=True) is None
    assert rule.throttled("p/a", 100.0, 1.0, has_limit=True) is None
    assert rule.throttled("p/b", 100.0, LONGEST_WAIT_OF_FEW + 1, has_limit=True) is None, "too long to be meant for all"
    assert rule.throttled("p/d", 150.0, LONGEST_WAIT_OF_FEW, has_limit=True) == []
    assert rule.throttled("p/c", 200.0, 1.0, has_limit=False) is None


def test_all_that_were_throttled_in_the_burst_are_the_common_limits():
    """Also who has no vote: what it learnt just now was not its own."""
    rule = passing(names(50, "well"))
    rule.throttled("p/again", -10.0, 1.0, has_limit=True)
    assert rule.throttled("p/again", 0.0, 1.0, has_limit=True) is None
    assert together(rule, names(FEW), 0.1, has_limit=True) == ["p/again", *names(FEW)]
    assert together(rule, names(FEW, "later"), BURST + 0.2, has_limit=True) == names(FEW, "later")


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0, 300), st.booleans(), st.booleans()), max_size=200))
def test_few_accounts_never_speak_for_all(steps):
    """Whatever the order: who speaks was throttled within the burst, and at least three do."""
    rule, at, lately = CommonLimit(), 0.0, {}
    for number, later, is_refused, has_limit in steps:
        at, name = at + later, f"p/{number}"
        if not is_refused:
            rule.passed(name, at)
            continue
        lately[name] = at
        accounts = rule.throttled(name, at, 1.0, has_limit=has_limit) or []
        assert not accounts or len(accounts) >= (FEW if has_limit else LEAST)
        assert all(lately[one] > at - BURST for one in accounts)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(retry_after, "MOST_ACCOUNTS", 10)
    monkeypatch.setattr(retry_after, "MOST_THROTTLED", 10)
    rule = CommonLimit()
    for n, name in enumerate(names(100)):
        rule.passed(name, float(n))
        rule.throttled(name, float(n), 1.0, has_limit=False)
    assert (len(rule._passed_at), len(rule._records)) == (10, 10)


def test_an_hour_of_one_account_is_bounded():
    rule = CommonLimit()
    for n in range(200):
        rule.throttled("p/a", n * REPEAT, 1.0, has_limit=False)
    assert len(rule._records["p/a"].events) == HOUR / REPEAT
