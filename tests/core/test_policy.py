"""Limits as declared, and which policy a key gets."""

import json
from dataclasses import asdict
from datetime import timedelta
from math import inf

import pytest

from resilient.core.base.errors import BadResourceKey, InvalidInput
from resilient.core.gates import policy as policies
from resilient.core.gates.policy import BreakerPolicy, Learning, Policies, Policy, Tenancy
from resilient.core.gates.rate_limit import Limit, seconds

PLAIN = Policy()


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


@pytest.mark.parametrize("span", ["", "x", "1 fortnight", ".", ". s", "-1s", "1e3s", 0, -1, float("nan"), float("inf")])
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
        ({"rate": float("inf"), "per": 1}, "write a number"),
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
    some = Policies(concurrency={"github/*": 4})
    assert some.for_key("github/a") is some.for_key("github/b")
    assert some.for_key("github/a") is some.for_key("github/a")


def test_limits_of_jobs_and_of_requests_are_apart():
    jobs, requests = Limit(1, 1, counts="jobs", name="j"), Limit(1, 1, name="r")
    policy = Policy((jobs, requests))
    assert (policy.job_limits, policy.request_limits, policy.plain) == ((jobs,), (requests,), False)
    assert (PLAIN.job_limits, PLAIN.request_limits, PLAIN.plain) == ((), (), True)


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
    with pytest.raises(InvalidInput, match=r"of one resource share a name \(1/1s, 1/1s\): give them names"):
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


COUNTS, TIMES = (
    ("volume", "children", "ramp_first", "streak"),
    ("window", "first_open", "longest_open", "probe_lease", "calm"),
)
CHILDREN = "use 2 to 16; one account never stops its provider, its own circuit does that work"


@pytest.mark.parametrize(
    ("name", "number", "what"),
    [
        *((name, number, "a count from 1") for name in COUNTS for number in (0, 2.5, inf)),
        *(
            (name, number, "a positive number of seconds, at most 1e9")
            for name in TIMES
            for number in (0, -1, inf, 2e9)
        ),
        *(("ramp", number, "a number of seconds from 0 to 1e9") for number in (-1, inf, 2e9)),
        *(("ratio", number, "above 0 and at most 1") for number in (0, 1.5)),
    ],
)
def test_a_number_of_a_breaker_that_means_nothing_is_named(name, number, what):
    with pytest.raises(InvalidInput) as error:
        BreakerPolicy(**{name: number})
    assert str(error.value) == f"BreakerPolicy({name}={number!r}): {name} is {what}"


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"children": 1}, f"BreakerPolicy(children=1): {CHILDREN}"),
        ({"children": 17}, f"BreakerPolicy(children=17): {CHILDREN}"),
        (
            {"first_open": 900},
            (
                "BreakerPolicy(first_open=900, longest_open=600): a circuit cannot first be open for longer than it"
                " may be; raise longest_open too"
            ),
        ),
    ],
)
def test_numbers_of_a_breaker_that_do_not_fit(members, text):
    with pytest.raises(InvalidInput) as error:
        BreakerPolicy(**members)
    assert str(error.value) == text


def test_the_least_that_a_breaker_may_have():
    least = dict.fromkeys(TIMES, 0.5) | {
        "volume": 1,
        "children": 2,
        "ramp_first": 1,
        "streak": 1,
        "ramp": 0,
        "ratio": 0.5,
    }
    assert asdict(BreakerPolicy(**least)) == least
    assert BreakerPolicy(streak=None, ratio=None, children=16).streak is None
    assert BreakerPolicy(ratio=1, ramp=0.5).ratio == 1
    longest = dict.fromkeys((*TIMES, "ramp"), 1e9)
    assert asdict(BreakerPolicy(**longest)).items() >= longest.items()


@pytest.mark.parametrize(
    ("word", "learning"),
    [
        (False, Learning(on=False)),
        (True, Learning()),
        ("latency", Learning(latency=True)),
        ("concurrency", Learning(slots=True)),
        ("rate", Learning(slots=False)),
        ((0.5, 50), Learning(bounds=(0.5, 50.0))),
        ((2, 2.0), Learning(bounds=(2.0, 2.0))),
    ],
)
def test_what_may_be_learnt(word, learning):
    assert Policies(learn={"crm/*": word}).for_key("crm/a").learn == learning
    assert Policies(learn={"crm/*": word}).for_key("crm/a/budget:core").learn == learning, "its budgets learn alike"
    assert Policies(learn={"crm/*": word}).for_key("crm/a/core").learn == Learning()


@pytest.mark.parametrize("word", ["fast", 5, None, (), (1,), (1, 2, 3), ("a", "b"), (2, 1), (0, 5), [1, 2]])
def test_what_cannot_be_learnt(word):
    with pytest.raises(InvalidInput) as error:
        Policies(learn={"crm/*": word})
    assert str(error.value) == (
        f"learn={{'crm/*': {word!r}}}: write False, (0.5, 50) in requests a second, 'rate', 'concurrency' or 'latency'"
    )


def test_pace():
    assert Policies(pace={"crm/*": "even"}).for_key("crm/a").pace == "even"
    with pytest.raises(InvalidInput) as error:
        Policies(pace={"crm/*": "odd"})
    assert str(error.value) == "pace={'crm/*': 'odd'}: write 'even', or leave it out"


def test_a_reserve_is_kept_from_lower_priorities():
    policy = Policies(reserve={"crm/*": {9: 0.5, 5: 0.25}}).for_key("crm/a")
    assert (policy.reserve, policy.plain) == (((5, 0.25), (9, 0.5)), False)
    assert [policy.kept_from(priority) for priority in (0, 4, 5, 8, 9)] == [0.75, 0.75, 0.5, 0.5, 0]


@pytest.mark.parametrize("shares", [5, None, {}, {"5": 0.2}, {5: 0}, {5: "much"}, {5: 1}, {5: 0.5, 9: 0.5}])
def test_a_reserve_that_leaves_nothing_or_is_none(shares):
    with pytest.raises(InvalidInput) as error:
        Policies(reserve={"crm/*": shares})
    assert str(error.value) == f"reserve={{'crm/*': {shares!r}}}: write priorities and shares, such as {{5: 0.2}}"


@pytest.mark.parametrize(
    ("first", "second"),
    [("a/xx", "a/x?"), ("a/x?", "a/*"), ("a/x*", "a/*"), ("a/*", "a/**"), ("a/x*", "a/**"), ("a/xx", "a/x*")],
)
def test_which_pattern_is_more_specific(first, second):
    for patterns in ((first, second), (second, first)):
        caps = {pattern: 1 + (pattern == first) for pattern in patterns}
        assert Policies(concurrency=caps).for_key("a/xx").concurrency == 2


def test_the_roots_that_patterns_spell_out():
    said = Policies(
        limits={"github/*": [Limit(1, 1)], "*/a": [Limit(1, 1)], "gi?/a": [Limit(1, 1)]},
        concurrency={"Xing": 1},
        breakers={"b/**": BreakerPolicy()},
        learn={"c/*": False},
        pace={"d/*": "even"},
        reserve={"e/*": {5: 0.2}},
    )
    assert said.roots == {"github", "Xing", "b", "c", "d", "e"}
    assert Policies().roots == set()


def test_capped_keys_and_tenancies():
    some = Policies(concurrency={"github": 8, "github/*/search": 2}, tenancies={"shop": Tenancy.APART})
    assert some.capped("github/a/search") == ("github/a/search", "github")
    assert (some.capped("gitlab/a"), Policies().capped("a/b")) == ((), ())
    assert [some.tenancy(key) for key in ("shop", "shop/a/b", "github/a")] == [*[Tenancy.APART] * 2, Tenancy.SHARED]


def test_choices_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(policies, "_MOST_KEYS", 3)
    some = Policies(concurrency={"a/*": 2})
    for n in range(10):
        assert some.for_key(f"a/{n}").concurrency == 2
        assert len(some._by_key) == n % 3 + 1


def test_what_a_row_overrides_is_all_that_can_be_read_of_it():
    """Whatever stands there: a claim reads it, and must go on."""
    declared = Policy(concurrency=3, breaker=BreakerPolicy(streak=9))
    wrong = ["x", 5, [1], {"rate": "x"}, [{"rate": 10**400, "per": 1}], [{"rate": 1, "per": 10**400}], [5]]
    for doc in (
        None,
        [],
        "limits",
        5,
        {"newer": 1},
        {"breaker": "x"},
        {"breaker": {"calm": "x"}},
        {"breaker": {"calm": 10**400}},
        {"concurrency": "x"},
    ):
        assert declared.stored(doc) == declared
    for limits in wrong:
        changed = declared.stored({"concurrency": 1, "limits": limits, "breaker": {"volume": 2, "newer": 1}})
        assert changed == Policy(concurrency=1, breaker=BreakerPolicy(streak=9, volume=2))
    assert declared.stored({"breaker": None, "limits": ["10/min"]}) == Policy((Limit(10, 60),), 3, declared.breaker)


@pytest.mark.parametrize(
    ("doc", "text"),
    [
        ({"limit": [], "cap": 1}, "a policy has limits, concurrency and breaker, not cap, limit"),
        (
            {"breaker": {"streaks": 1, "calm": 9, "v": 2}},
            (
                "a breaker policy has no 'streaks', 'v', only streak, ratio, volume, window, children, first_open,"
                " longest_open, probe_lease, calm, ramp, ramp_first"
            ),
        ),
    ],
)
def test_an_override_names_what_is_no_aspect(doc, text):
    with pytest.raises(InvalidInput) as error:
        Policy().overridden(doc)
    assert str(error.value) == text


def test_a_policy_as_json():
    doc = Policy((Limit(1, 2, burst=3, name="n"),), 4).to_json()
    assert doc == {"limits": [{"rate": 1, "per": 2, "burst": 3, "name": "n", "counts": "requests"}], "concurrency": 4,
                   "breaker": asdict(BreakerPolicy())}  # fmt: skip
