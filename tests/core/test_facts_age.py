"""When a provider's facts are so old that somebody should look."""

from datetime import date

import pytest

from resilient.core.provider.facts import Provider, is_old, warning

READ = date(2026, 11, 1)


@pytest.mark.parametrize(
    ("today", "old"),
    [(date(2026, 11, 1), False), (date(2027, 11, 1), False), (date(2027, 11, 2), True), (date(2026, 1, 1), False)],
)
def test_more_than_a_year(today, old):
    assert is_old(READ, today) is old
    assert bool(warning(Provider(name="acme", verified_on=READ), today)) is old


def test_facts_that_nobody_vouched_for_cannot_grow_old():
    assert not is_old(None, date(2099, 1, 1))
    assert warning(Provider(name="acme"), date(2099, 1, 1)) == ""


def test_it_says_whose_and_since_when():
    found = warning(Provider(name="acme", verified_on=READ), date(2028, 1, 1))
    assert found == "the facts of acme were last checked on 2026-11-01, more than a year ago"
