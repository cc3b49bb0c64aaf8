"""What each shard gets of what a whole provider allows, and which shares are refused."""

import pytest

from resilient.core.base.errors import SetupError
from resilient.core.gates.rate_limit import (
    Limit,
    bounded,
    check_shares,
    divided,
    divided_caps,
    divided_learning,
    is_shared,
)

ONE = Limit(10, per=1, burst=5, name="r", counts="jobs")
OFTENER = "; declare each one's, Shard(url, share=0.5)"
LONGER = (
    "is less than one request: shards count apart, so each would send that one; give it a larger share,"
    " or a longer span (120 per 2 minutes instead of 1 a second)"
)


def part(limit, share):
    """What a shard gets of one limit of a provider."""
    return divided({"crm": [limit]}, share, "x")["crm"][0]


@pytest.mark.parametrize(
    ("pattern", "shared"), [("crm", True), ("c*", True), ("crm/*", False), ("crm:token@*", False), ("crm:x", True)]
)
def test_what_stands_at_a_root_is_shared(pattern, shared):
    assert is_shared(pattern) is shared


@pytest.mark.parametrize(
    ("shares", "shared", "result"),
    [
        ({"a": None}, ["crm"], {"a": 1.0}),
        ({"a": None, "b": None}, [], {"a": 1.0, "b": 1.0}),  # nothing is divided
        ({"a": 1}, ["crm"], {"a": 1}),
        ({"a": 0.7, "b": 0.3}, ["crm"], {"a": 0.7, "b": 0.3}),
        ({"a": 0.7, "b": 0.2}, [], {"a": 0.7, "b": 0.2}),
        (dict.fromkeys("abcdefghij", 0.1), ["crm"], dict.fromkeys("abcdefghij", 0.1)),
        ({"a": 0.1, "b": 0.7, "c": 0.2}, ["crm"], {"a": 0.1, "b": 0.7, "c": 0.2}),
        (dict.fromkeys("abc", 0.3333333335), ["crm"], dict.fromkeys("abc", 0.3333333335)),  # as somebody rounds it
    ],
)
def test_shares(shares, shared, result):
    assert check_shares(shares, shared) == result


@pytest.mark.parametrize(
    ("shares", "shared", "text"),
    [
        (
            {"a": None, "b": None},
            ["crm", "dms"],
            f"shard 'a' has no share: 'crm' has a limit or cap for all accounts together{OFTENER}",
        ),
        ({"a": 0.5, "b": None}, [], f"shard 'b' has no share{OFTENER}"),
        ({"a": 0.0}, [], "shard 'a': share=0.0 is a part of 1, above 0"),
        ({"a": 1.1}, [], "shard 'a': share=1.1 is a part of 1, above 0"),
        ({"a": True}, [], "shard 'a': share=True is a part of 1, above 0"),
        ({"a": "0.5"}, [], "shard 'a': share='0.5' is a part of 1, above 0"),
        (
            {"a": 0.7, "b": 0.4},
            [],
            "the shares of the shards are 1.1 together: at most 1, or they exceed every limit",
        ),
    ],
)
def test_bad_shares(shares, shared, text):
    with pytest.raises(SetupError) as error:
        check_shares(shares, shared)
    assert str(error.value) == text


def test_what_a_whole_provider_allows_is_divided():
    limits = {"crm": [ONE], "crm/*": [Limit(7, per=1)], "crm:token@*": [Limit(2, per=1)]}
    parts = [divided(limits, share, "x") for share in (0.6, 0.4)]
    assert [part["crm"][0] for part in parts] == [
        Limit(6, per=1, burst=3, name="r", counts="jobs"),
        Limit(4, per=1, burst=2, name="r", counts="jobs"),
    ]
    assert all(part[key] == limits[key] for part in parts for key in ("crm/*", "crm:token@*"))


@pytest.mark.parametrize("limit", [Limit(10, per=1, burst=1), Limit(1, per=1), Limit(2, per=1, burst=9), Limit(0.5, 1)])
def test_less_than_one_request_is_no_part(limit):
    with pytest.raises(SetupError) as error:
        part(limit, 0.45)
    assert str(error.value) == f"0.45 of the limit {limit.name} of 'crm' in shard 'x' {LONGER}"
    assert part(limit, 1) is limit


def test_a_part_of_one_that_floats_make_a_little_less_is_one():
    assert part(Limit(10, per=1), 0.1).rate == 1
    assert part(Limit(40, per=1, burst=10), 0.1 - 1e-12).burst == 1
    assert divided_caps({"crm": 10, "dms": 30}, 0.1, "x") == {"crm": 1, "dms": 3}


def test_caps_are_divided_and_rounded_down():
    assert divided_caps({"crm": 5, "crm/*": 3}, 0.5, "x") == {"crm": 2, "crm/*": 3}
    with pytest.raises(SetupError) as error:
        divided_caps({"crm": 5}, 0.1, "x")
    assert str(error.value) == "0.1 of the cap of 'crm', 5, leaves shard 'x' no job at once"


def test_bounds_of_what_is_learnt_are_divided():
    learning = {"crm": (1.0, 50.0), "crm/*": (1.0, 50.0), "dms": "latency", "erp": False}
    assert bounded(learning) == ["crm", "crm/*"]
    assert divided_learning(learning, 0.5) == {**learning, "crm": (0.5, 25.0)}
    assert divided_learning(learning, 1) == learning
