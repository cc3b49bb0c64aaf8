"""What is believed from outside has a cap, on one page."""

from resilient.core.base.bounds import Bound, bounds
from resilient.wire.requests.pool import PoolSettings


def test_every_bound_has_a_name_of_its_own_a_value_and_says_what_happens_beyond_it():
    every = bounds()
    assert len({one.name for one in every}) == len(every) > 10
    for one in every:
        assert isinstance(one, Bound)
        assert one.name.isidentifier()
        assert one.name.islower()
        assert one.value > 0
        assert one.beyond


def test_the_page_is_in_the_order_of_names():
    names = [one.name for one in bounds()]
    assert names == sorted(names)


def test_defaults_of_settings_are_those_of_the_page():
    page, settings = {one.name: one.value for one in bounds()}, PoolSettings()
    assert settings.largest == page["answer_body"]
    assert settings.error_largest == page["error_body"]
    assert settings.whole == page["answer_time"]
