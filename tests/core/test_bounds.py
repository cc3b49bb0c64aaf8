"""What is believed from outside has a cap, on one page."""

import pytest

from resilient.core.base.bounds import TOLD_WAIT, Bound, believed_wait, bounds
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
    assert settings.bodies == page["answer_bodies"]
    assert settings.error_largest == page["error_body"]
    assert settings.whole == page["answer_time"]


DAY = TOLD_WAIT.value


@pytest.mark.parametrize(
    ("seconds", "window", "believed"),
    [
        (0, 0, 0),
        (30, 0, 30),
        (DAY - 0.5, 0, DAY - 0.5),
        (DAY + 0.5, 0, DAY),
        (DAY + 1, 3_600, DAY),
        (7 * DAY, 30 * DAY, 7 * DAY),
        (30 * DAY, 30 * DAY, 30 * DAY),
        (30 * DAY + 1, 30 * DAY, DAY),  # beyond both: tried once a day
    ],
)
def test_a_wait_is_believed_up_to_a_day_or_the_longest_window(seconds, window, believed):
    assert believed_wait(seconds, window) == believed
    if window == 0:
        assert believed_wait(seconds) == believed
