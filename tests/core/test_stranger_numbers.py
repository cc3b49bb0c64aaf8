"""Numbers that a server writes: whatever they are, nothing raises, nothing overflows, and waits end."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from providers.microsoft_graph import GRAPH
from providers.shopify import SHOPIFY
from resilient.core.base.bounds import TOLD_WAIT, believed_wait
from resilient.core.base.budgets import Fields, budgets
from resilient.core.base.errors import FailureKind
from resilient.core.base.exchange import AnswerFacts, RequestFacts
from resilient.core.gates.admission import Level, ResourceFacts, admit
from resilient.core.gates.policy import Policy, Tenancy
from resilient.core.gates.rate_limit import FULL, Limit, available, draw, give_back, observe, ready_at, refund
from resilient.core.gates.retry_after import cooled
from resilient.core.provider.classify import classify, cost_of
from resilient.core.provider.facts import Provider
from resilient.core.provider.rules import Errors, Rule, Wait
from resilient.engine.gates.budgets import Reach, UndeclaredBudgets, observation_of, refill_time, refill_wait

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DAY = float(TOLD_WAIT.value)
ASKED = RequestFacts("GET", "https://api.example.com/x", "api.example.com", "/x", key="p/a")
PLAIN = Provider(name="p")
NAMES = (
    "retry-after", "retry-after-ms", "x-ms-retry-after-ms", "x-ratelimit-limit", "x-ratelimit-remaining",
    "x-ratelimit-reset", "ratelimit", "ratelimit-policy", "ratelimit-limit", "ratelimit-remaining",
    "ratelimit-reset", "x-ms-resource-unit", "date",
)  # fmt: skip
numbers = st.one_of(
    st.integers(-10, 10**6).map(str),
    st.integers(1, 600).map(lambda n: "9" * n),
    st.sampled_from(
        ["", "0", "-0", "-1", "+1", "1e999", "1e-999", "nan", "NaN", "inf", "-inf", "Infinity", "٣", "0x10", "1_000",
         "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "Fri, 31 Dec 9999 23:59:59 GMT", "99999999999999d", "1,2"]
    ),
    st.text(max_size=12),
)  # fmt: skip
structured = st.builds(
    '"{}";r={};t={};q={};w={}'.format, st.sampled_from(["app", "core", "x"]), numbers, numbers, numbers, numbers
)
headers = st.dictionaries(st.sampled_from(NAMES), st.one_of(numbers, structured), max_size=6)
statuses = st.sampled_from([200, 403, 429, 500, 503])
json_numbers = st.one_of(
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
)


@given(headers, statuses)
def test_no_header_makes_anybody_wait_for_ever(found, status):
    fields = Fields.of(found)
    facts = AnswerFacts(status, fields, budgets=budgets(fields, NOW))
    failure = classify(facts, ASKED, PLAIN, NOW)
    if failure is not None and failure.retry_in is not None:
        assert 0 < failure.retry_in <= DAY
        until = cooled(ResourceFacts("p/a"), NOW + timedelta(seconds=failure.retry_in), NOW, 0.999)
        assert NOW < until <= NOW + timedelta(seconds=DAY + 31)


@given(headers, st.sampled_from(list(Tenancy)))
def test_no_budget_binds_others_or_lasts(found, tenancy):
    declared = (("p", Limit(100, "1s", name="app")), ("p", Limit(7, "1s")), ("p/a", Limit(50, "1m", name="core")))
    reach = Reach.of(declared, "p/a", tenancy)
    for budget in budgets(Fields.of(found), NOW):
        told = observation_of(budget, reach, NOW, NOW)
        if told is not None:
            assert told.resource_key == "p/a" or (told.limit.name == budget.name and tenancy is not Tenancy.APART)
            assert NOW.timestamp() < told.reset_at <= NOW.timestamp() + DAY
            walk(told)
        until = refill_time(budget, reach, NOW)
        assert until is None or NOW < until <= NOW + timedelta(seconds=DAY)
        left = refill_wait(budget, reach, NOW)
        if left is not None:
            assert 0 < left <= DAY
            kept, near = UndeclaredBudgets(), []
            for _ in range(2):
                near = kept.take_in("p/a", [(budget, left)], NOW.timestamp(), everything=True)
            assert all(0 < limit.interval <= 1.1 * DAY for limit, _ in near)


def walk(told):
    """The limit goes on working with what it was told."""
    now, limit = NOW.timestamp(), told.limit
    state = observe(FULL, told.remaining, told.reset_at, told.sent_at)
    assert available(limit, state, now) >= 0
    assert now <= ready_at(limit, state, 1, now) <= now + DAY + limit.per
    drawn = draw([(limit, state)], 1, now, patience=2 * DAY)
    assert drawn.granted
    json.dumps(give_back(limit, drawn.states[0], 1, now, drawn.states[0].tat), allow_nan=False)
    json.dumps(refund(limit, drawn.states[0], 1, now), allow_nan=False)
    level = Level(ResourceFacts("p/a"), Policy((limit,)), {limit.name: state})
    assert 0 <= admit([level], 5, NOW, "w").count <= 5
    assert available(limit, drawn.states[0], told.reset_at + limit.per) > 0


@given(json_numbers, json_numbers, json_numbers, numbers)
def test_no_body_tells_an_endless_wait_or_cost(cost, available_, rate, header):
    status = {"currentlyAvailable": available_, "restoreRate": rate}
    body = {"extensions": {"cost": {"actualQueryCost": cost, "requestedQueryCost": cost, "throttleStatus": status}}}
    body["errors"] = [{"extensions": {"code": "THROTTLED"}}]
    answer = AnswerFacts(200, Fields.of({"x-ms-resource-unit": header}), body=body)
    failure = classify(answer, ASKED, SHOPIFY, NOW)
    assert 0 < failure.retry_in <= DAY
    for provider in (SHOPIFY, GRAPH):
        known = cost_of(answer, provider)
        assert known is None or 0 <= known < float("inf")


@given(json_numbers)
def test_no_word_of_a_body_tells_an_endless_wait(value):
    rule = Rule(FailureKind.THROTTLED, status=429, wait=Wait(body="retry_after"))
    failure = classify(
        AnswerFacts(429, body={"retry_after": value}), ASKED, Provider(name="p", errors=Errors(rules=(rule,))), NOW
    )
    assert failure.retry_in is None or 0 < failure.retry_in <= DAY


@pytest.mark.parametrize(
    ("told", "window", "believed"),
    [
        (30, 0, 30),
        (86_400, 0, 86_400),
        (86_401, 0, 86_400),  # beyond a day: a probe a day
        (7 * 86_400, 31 * 86_400, 7 * 86_400),  # a monthly quota
        (40 * 86_400, 31 * 86_400, 86_400),
        (7200, 3600, 7200),  # longer than its window, and shorter than a day: never earlier than told
        (float("inf"), 60, 86_400),
    ],
)
def test_what_is_believed(told, window, believed):
    assert believed_wait(told, window) == believed


def test_the_windows_of_the_facts():
    monthly = Rule(FailureKind.QUOTA, status=429, code="month", wait=Wait(period="month"))
    facts = Provider(name="p", limits={"account": [Limit(5, "1h")]}, errors=Errors(code=("code",), rules=(monthly,)))
    assert (PLAIN.longest_window, facts.longest_window) == (0, 31 * 86_400)
    far = AnswerFacts(429, Fields.of({"retry-after": str(20 * 86_400)}))
    assert classify(far, ASKED, facts, NOW).retry_in == 20 * 86_400
    assert classify(far, ASKED, PLAIN, NOW).retry_in == DAY
    assert classify(AnswerFacts(503, far.headers), ASKED, PLAIN, NOW).retry_in == DAY
