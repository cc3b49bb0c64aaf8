"""Limits as declared, and which policy a key gets."""

import json
from datetime import timedelta

import pytest

from resilient.core.base.errors import BadResourceKey, InvalidInput
from resilient.core.gates.policy import BreakerPolicy, Policies, Policy
from resilient.core.gates.rate_limit import Limit, seconds


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (60, 60),
        (0.5, 0.5),
        ("1m", 60),
        ("min", 60),
        ("90s", 90),
        ("1.5 h", 5400),
        ("Day", 86400),
        (timedelta(hours=1), 3600),
    ],
)
def test_spans(span, expected):
    assert seconds(span) == expected


@pytest.mark.parametrize("span", ["", "x", "1 fortnight", ".", "-1s", "1e3s", 0, -1, float("nan"), float("inf")])
def test_bad_spans_are_named(span):
    with pytest.raises(InvalidInput, match="span of time"):
        seconds(span)


@pytest.mark.parametrize(
    ("text", "rate", "per", "burst"),
    [
        ("100/min", 100, 60, None),
        ("5000/1h", 5000, 3600, None),
        ("10/s", 10, 1, None),
        ("2/s burst 40", 2, 1, 40),
    ],
)
def test_limits_as_text(text, rate, per, burst):
    limit = Limit.parse(text)
    assert (limit.rate, limit.per, limit.burst) == (rate, per, burst)
    assert Limit.from_json(text) == limit


@pytest.mark.parametrize(
    "text", ["", "100", "x/min", "100/", "100/min burst x", "100/fortnight", "-1/s", "1/s burst 0"]
)
def test_bad_limit_text_is_named(text):
    with pytest.raises(InvalidInput):
        Limit.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0, "per": 1}, "rate must be positive"),
        ({"rate": 1, "per": 1, "burst": 0.5}, "burst at least 1"),
        ({"rate": float("inf"), "per": 1}, "rate must be positive and finite"),
        ({"rate": 1, "per": 1, "name": "no, commas"}, "cannot name a limit"),
        ({"rate": 1, "per": 1, "counts": "apples"}, "'requests' or 'jobs'"),
    ],
)
def test_bad_limits_are_refused(arguments, message):
    with pytest.raises(InvalidInput, match=message):
        Limit(**arguments)


def test_a_limit_survives_json():
    for limit in (Limit(100, "1m"), Limit(2, 1, burst=40, name="bucket", counts="jobs"), Limit(0.5, per=10)):
        again = Limit.from_json(json.loads(json.dumps(limit.to_json())))
        assert again == limit
        assert (again.interval, again.capacity) == (limit.interval, limit.capacity)


def test_defaults_of_a_limit():
    assert Limit(100, per=60).name == "100/60s"
    assert Limit(100, per=60).capacity == 10  # a tenth at once
    assert Limit(3, per=60).capacity == 1
    assert (Limit(2, per=1, burst=40).capacity, Limit(2, per=1, burst=40).interval) == (40, 0.5)


POLICIES = Policies(
    limits={
        "github/**": [Limit(1, per=1, name="deep")],
        "github/*": [Limit(2, per=1, name="account")],
        "github/vip-*": [Limit(3, per=1, name="vip")],
        "github/vip-1": [Limit(4, per=1, name="one")],
        "github/*/search": [Limit(5, per=1, name="search")],
        "github": [Limit(6, per=1, name="provider")],
    },
    concurrency={"github": 8, "github/*": 4},
    breakers={"github/*": BreakerPolicy(streak=9)},
)


@pytest.mark.parametrize(
    ("key", "names", "cap", "streak"),
    [
        ("github", ["provider"], 8, 5),
        ("github/a", ["account"], 4, 9),
        ("github/vip-2", ["vip"], 4, 9),
        ("github/vip-1", ["one"], 4, 9),
        ("github/a/search", ["search"], None, 5),
        ("github/a/repos", ["deep"], None, 5),
        ("gitlab/a", [], None, 5),
    ],
)
def test_the_most_specific_pattern_wins_per_aspect(key, names, cap, streak):
    policy = POLICIES.for_key(key)
    assert ([x.name for x in policy.limits], policy.concurrency, policy.breaker.streak) == (
        names,
        cap,
        streak,
    )


def test_of_equal_patterns_the_later_wins():
    assert Policies(concurrency={"a/x*": 1, "a/*x": 2}).for_key("a/xx").concurrency == 2


def test_keys_of_one_pattern_share_one_policy():
    assert POLICIES.for_key("github/a") is POLICIES.for_key("github/b")
    assert POLICIES.for_key("github/a") is POLICIES.for_key("github/a")


def test_an_override_replaces_only_its_aspects():
    policy = POLICIES.for_key("github/a", {"concurrency": 1, "breaker": {"volume": 3}})
    assert (policy.concurrency, policy.breaker.volume, policy.breaker.streak) == (1, 3, 9)
    assert [x.name for x in policy.limits] == ["account"]
    policy = POLICIES.for_key("github/a", {"limits": ["10/min", {"rate": 1, "per": 1, "counts": "jobs"}]})
    assert [(x.rate, x.counts) for x in policy.limits] == [(10, "requests"), (1, "jobs")]
    assert POLICIES.for_key("github/a", {"concurrency": None}).concurrency is None
    assert POLICIES.for_key("github/a", {"limits": None}).plain is False  # the cap is left


@pytest.mark.parametrize(
    "override",
    [
        {"limit": []},
        {"breaker": {"streaks": 1}},
        {"limits": [{"rate": 1}]},
        {"limits": ["x"]},
        {"concurrency": 0},
    ],
)
def test_an_override_that_is_none_is_refused(override):
    with pytest.raises(InvalidInput):
        Policy().overridden(override)


def test_a_policy_survives_json():
    policy = POLICIES.for_key("github/a")
    assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


def test_bad_declarations_fail_at_the_start():
    with pytest.raises(BadResourceKey):
        Policies(limits={"git hub/*": [Limit(1, 1)]})
    with pytest.raises(InvalidInput, match="share a name"):
        Policies(limits={"a": [Limit(1, 1), Limit(1, 1)]})
    with pytest.raises(InvalidInput, match="pause it"):
        Policies(concurrency={"a": 0})
    with pytest.raises(InvalidInput, match="not '4'"):
        Policies(concurrency={"a": "4"})
    for found in ("100/min", Limit(1, 1), ["100/min"], 5):
        with pytest.raises(InvalidInput, match=r"the limits of 'a' are .*: write \[Limit\("):
            Policies(limits={"a": found})
    with pytest.raises(InvalidInput, match=r"the breaker of 'a' is 5: write BreakerPolicy\("):
        Policies(breakers={"a": 5})
    for bad in ({"streak": 0}, {"ratio": 0.0}, {"ratio": 2.0}, {"window": 0}, {"children": 0}, {"ramp": -1}):
        with pytest.raises(InvalidInput, match=rf"BreakerPolicy\({next(iter(bad))}=.*\): {next(iter(bad))} is "):
            BreakerPolicy(**bad)
    assert BreakerPolicy(streak=None, ratio=None, ramp=0).streak is None


@pytest.mark.parametrize(
    ("members", "children", "first", "longest"),
    [({"children": 1}, 2, 15, 600), ({"children": 99}, 16, 15, 600), ({"first_open": 900}, 3, 900, 900),
     ({"longest_open": 5}, 3, 15, 15)],
)  # fmt: skip
def test_an_override_of_older_code_stops_no_worker(members, children, first, longest):
    breaker = Policies().for_key("a/b", {"breaker": members}).breaker
    assert (breaker.children, breaker.first_open, breaker.longest_open) == (children, first, longest)
    with pytest.raises(InvalidInput):
        Policy().overridden({"breaker": members})
