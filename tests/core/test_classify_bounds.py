"""Classification at its bounds: what a failure says, which field states a wait, how far a text is read."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest

from resilient.core.base.budgets import Budget, Fields
from resilient.core.base.errors import Failure, Scope
from resilient.core.base.errors import FailureKind as K
from resilient.core.base.exchange import AnswerFacts, RequestFacts
from resilient.core.base.instants import Word
from resilient.core.gates.rate_limit import Limit
from resilient.core.gates.retry_after import WaitDialect
from resilient.core.provider.classify import (
    Phase,
    believed,
    classify,
    classify_error,
    cost_of,
    message_of,
    rule_for,
)
from resilient.core.provider.facts import GENERIC, Provider
from resilient.core.provider.rules import Errors, Rule, Wait

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
GET = RequestFacts("GET", "https://api.example.com/x", "api.example.com", "/x", key="api/acct")
POST = RequestFacts("POST", "https://api.example.com/x", "api.example.com", "/x", repeatable=False)
DAY = 86_400.0


def answer(status, body=None, text="", budgets=(), **headers):
    named = Fields.of({name.replace("_", "-"): value for name, value in headers.items()})
    return AnswerFacts(status, named, body=body, text=text, budgets=budgets)


def dialect(*rules, **facts):
    return Provider(name="p", errors=Errors(rules=rules, **facts))


def verdict(rule, came, request=GET, now=NOW):
    return classify(came, request, dialect(rule), now)


# -- what a failure says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "repeatable", "failure"),
    [
        (Phase.POOL, True, Failure(K.TRANSIENT, code="pool", counts_for_breaker=False)),
        (Phase.TLS, True, Failure(K.PERMANENT, code="tls")),
        (Phase.UNSENDABLE, False, Failure(K.PERMANENT, code="unsendable")),
        (Phase.UNREADABLE, False, Failure(K.PERMANENT, code="unreadable")),
        (Phase.CONNECT, False, Failure(K.TRANSIENT, code="connect", provider_wide=True)),
        (Phase.WRITE, True, Failure(K.TRANSIENT, code="write", provider_wide=True)),
        (Phase.READ, False, Failure(K.AMBIGUOUS, code="read", provider_wide=True)),
    ],
)
def test_an_error_without_an_answer(phase, repeatable, failure):
    assert classify_error(phase, repeatable=repeatable) == failure
    assert classify_error(phase, repeatable=repeatable, code="dns") == replace(failure, code="dns")


@pytest.mark.parametrize(
    ("rule", "status", "request_", "failure"),
    [
        (Rule(K.TRANSIENT), 400, GET, Failure(K.TRANSIENT, code="http_400", status=400)),
        (Rule(K.TRANSIENT), 500, GET, Failure(K.TRANSIENT, code="http_500", status=500, provider_wide=True)),
        (Rule(K.TRANSIENT), 408, GET, Failure(K.TRANSIENT, code="http_408", status=408, provider_wide=True)),
        (Rule(K.PERMANENT), 500, GET, Failure(K.PERMANENT, code="http_500", status=500)),
        (Rule(K.AMBIGUOUS), 500, POST, Failure(K.AMBIGUOUS, code="http_500", status=500, provider_wide=True)),
        (Rule(K.AMBIGUOUS), 400, POST, Failure(K.AMBIGUOUS, code="http_400", status=400)),
        (Rule(K.AMBIGUOUS), 400, GET, Failure(K.TRANSIENT, code="http_400", status=400)),
        (Rule(K.TRANSIENT), 504, POST, Failure(K.AMBIGUOUS, code="http_504", status=504, provider_wide=True)),
        (Rule(K.CONFLICT), 504, POST, Failure(K.CONFLICT, code="http_504", status=504)),
        (
            Rule(K.TRANSIENT, provider_wide=False, counts_for_breaker=True, scope=Scope.PROVIDER),
            500,
            GET,
            Failure(K.TRANSIENT, Scope.PROVIDER, code="http_500", status=500, counts_for_breaker=True),
        ),
        (
            Rule(K.PERMANENT, provider_wide=True, counts_for_breaker=False, scope=Scope.ENDPOINT),
            400,
            GET,
            Failure(
                K.PERMANENT, Scope.ENDPOINT, code="http_400", status=400, counts_for_breaker=False, provider_wide=True
            ),
        ),
    ],
)
def test_a_rule_says_whom_a_failure_is_about_else_its_kind_and_status(rule, status, request_, failure):
    assert verdict(rule, answer(status), request_) == failure


@pytest.mark.parametrize("status", [400, 503])
def test_the_code_is_the_first_that_was_found_with_or_without_rules(status):
    facts = dialect(code=("error.code", "error.type"))
    failure = classify(answer(status, {"error": {"type": "b", "code": "a"}}), GET, facts, NOW)
    assert (failure.code, failure.status) == ("a", status)


@pytest.mark.parametrize(
    ("facts", "came", "code"),
    [
        ({"code": ("n",)}, answer(400, {"n": 7}), "7"),
        ({"code": ("n",)}, answer(400, {"n": 0}), "0"),
        ({"code": ("n",)}, answer(400, {"n": True}), "http_400"),
        ({"code": ("n",)}, answer(400, {"n": ""}), "http_400"),
        ({"code": ("n",)}, answer(400, {"n": 1.5}), "http_400"),
        ({"code": ("n",)}, answer(400, {"n": None}), "http_400"),
        ({"code": ("n",)}, answer(400, {"n": "a\nb  c"}), "a b c"),
        ({"code": ("n",)}, answer(400, {"n": "x" * 101}), "x" * 100),
        ({"code": ("n",), "code_header": "x-code"}, answer(400, {"n": "a"}, x_code="b"), "a"),
        ({"code": ("n",), "code_header": "x-code"}, answer(400, {}, x_code="b"), "b"),
        ({"code_header": "x-code"}, answer(400), "http_400"),
        ({"code_text": "<c>(.*)</c>"}, answer(400, text="-<c>a</c>"), "a"),
        ({"code_text": "<c>(.*)</c>"}, answer(400, {}, text="<c>a</c>"), "http_400"),  # JSON is read by its paths
        ({"code_text": "<c>(.*)</c>"}, answer(400, text="a"), "http_400"),
        ({"code_text": "(a)"}, answer(400, text=" " * 65_535 + "a"), "a"),
        ({"code_text": "(a)"}, answer(400, text=" " * 65_536 + "a"), "http_400"),
        ({"code": ("n",), "code_form": "a(.)"}, answer(400, {"n": "-ab"}), "b"),
        ({"code": ("n",), "code_form": "a(.)"}, answer(400, {"n": "cd"}), "cd"),
        ({"code": ("n",), "code_form": "(b)"}, answer(400, {"n": "a" * 499 + "b"}), "b"),
        ({"code": ("n",), "code_form": "(b)"}, answer(400, {"n": "a" * 500 + "b"}), "a" * 100),
    ],
)
def test_where_a_code_stands_and_how_far_it_is_read(facts, came, code):
    assert classify(came, GET, dialect(**facts), NOW).code == code


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"a": "first", "b": "second"}, "first"),
        ({"a": " \n", "b": " second\nline "}, "second line"),
        ({"a": 5, "b": "second"}, "second"),
        ({"a": {}, "b": ["second"]}, ""),
        ({}, ""),
        (None, ""),
        ({"a": " " * 16_384 + "far"}, ""),
    ],
)
def test_the_first_message_that_says_anything(body, message):
    assert message_of(answer(400, body), dialect(message=("a", "b"))) == message


# -- which rule decides ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "came", "fits"),
    [
        ({}, answer(399), False),
        ({}, answer(400), True),
        ({"status": 404}, answer(404), True),
        ({"status": 404}, answer(405), False),
        ({"status": range(404, 406)}, answer(405), True),
        ({"status": (404, 405)}, answer(406), False),
        ({"code": "a*"}, answer(400, {"c": "ab"}), True),
        ({"code": "a*"}, answer(400, {"c": "b"}), False),
        ({"code": "A*"}, answer(400, {"c": "ab"}), False),
        ({"code": ("x", "b")}, answer(400, {"c": "b"}), True),
        ({"code": "ab"}, answer(400), False),
        ({"json": True}, answer(400, {}), True),
        ({"json": True}, answer(400), False),
        ({"json": False}, answer(400), True),
        ({"json": False}, answer(400, {}), False),
        ({"path": "/x*"}, answer(400), True),
        ({"path": "/X"}, answer(400), False),
        ({"path": "/y"}, answer(400), False),
        ({"where": {"a": 1}}, answer(400, {"a": 1}), True),
        ({"where": {"a": 1}}, answer(400, {"a": True}), False),
        ({"where": {"a": 1}}, answer(400, {"a": 2}), False),
        ({"where": {"a[]": 1}}, answer(400, {"a": [2, 1]}), True),
        ({"where": {"a": ...}}, answer(400, {"a": "x"}), True),
        *(({"where": {"a": ...}}, answer(400, {"a": value}), False) for value in (None, False, "", [], {}, 0)),
        ({"where": {"a": 1, "b": 1}}, answer(400, {"a": 1}), False),
        ({"header": {"X-A": "^1$"}}, answer(400, x_a="1"), True),
        ({"header": {"X-A": "^1$"}}, answer(400, x_a="11"), False),
        ({"header": {"X-A": "^$"}}, answer(400), True),
        ({"header": {"X-A": "1", "X-B": "1"}}, answer(400, x_a="1"), False),
        ({"header": {"X-A": "1"}}, answer(400, x_a=" " * 8_191 + "1"), True),
        ({"header": {"X-A": "1"}}, answer(400, x_a=" " * 8_192 + "1"), False),
        ({"text": "b"}, answer(400, text="abc"), True),
        ({"text": "b"}, answer(400, text="ac"), False),
        ({"text": "^$"}, answer(400), True),
        ({"text": "b"}, answer(400, text=" " * 65_536 + "b"), False),
    ],
)
def test_a_rule_fits_if_all_that_it_states_fits(rule, came, fits):
    made = Rule(K.CONFLICT, **rule)
    assert (rule_for(came, GET, dialect(made, code=("c",))) is made) is fits


def test_the_first_rule_that_fits_decides():
    first, second = Rule(K.CONFLICT, code="a"), Rule(K.AUTH)
    facts = dialect(first, second, code=("c",))
    assert rule_for(answer(400, {"c": "a"}), GET, facts) is first
    assert rule_for(answer(400, {"c": "b"}), GET, facts) is second
    assert rule_for(answer(400, {"c": "a"}), GET, facts, ("b",)) is second, "of the codes that were found already"
    assert rule_for(answer(400), GET, GENERIC) is None


# -- waits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "came", "seconds"),
    [
        (Wait(header="x-wait"), answer(429, x_wait="7"), 7),
        (Wait(header="X-Wait", word=Word.DELTA_MS), answer(429, x_wait="7000"), 7),
        (Wait(header="x-wait"), answer(429, x_wait="0"), None),
        (Wait(header="x-wait", body="a"), answer(429, {"a": 5}, x_wait="7"), 7),
        (Wait(header="x-wait", body="a"), answer(429, {"a": 5}, x_wait="soon"), 5),
        (Wait(body="a[]"), answer(429, {"a": ["soon", 0, 5, 9]}), 5),
        (Wait(body="a[]"), answer(429, {"a": ["soon"]}), None),
        (Wait(body="a", word=Word.DELTA_MS), answer(429, {"a": 5_000}), 5),
        (Wait(body="a", text="wait (.*)s"), answer(429, {"a": 5}, text="wait 9s"), 5),
        (Wait(body="a", text="wait (.*)s"), answer(429, {"a": 0}, text="wait 9s"), 9),
        (Wait(text="wait (.*)!", word=Word.DELTA_MS), answer(429, text="wait 9000!"), 9),
        (Wait(text="wait (.*)!"), answer(429, text="wait 9s"), None),
        (Wait(header="x-wait", seconds=lambda _: 3), answer(429, {}, x_wait="7"), 7),
        (Wait(header="x-wait", seconds=lambda body: body["a"]), answer(429, {"a": 3}), 3),
        (Wait(seconds=lambda _: 0.5), answer(429, {}), 0.5),
        (Wait(seconds=lambda _: 0.5), answer(429), None),  # no JSON
        *(
            (Wait(seconds=lambda _, value=value: value), answer(429, {}), None)
            for value in (None, 0, -1, float("inf"), float("nan"))
        ),
        (Wait(seconds=lambda body: body["a"]), answer(429, {}), None),
        (Wait(seconds=lambda _: 1 / 0), answer(429, {}), None),
        (Wait(seconds=lambda body: body.a), answer(429, {}), None),
        (Wait(seconds=lambda _: float("x")), answer(429, {}), None),
        (Wait(seconds=lambda body: body + 1), answer(429, {}), None),
        (Wait(body="a"), answer(429, {"a": 5}, retry_after="9"), 5),
        (Wait(body="a"), answer(429, {}, retry_after="9"), 9),
        (Wait(fallback=60), answer(429, retry_after="9"), 9),
        (Wait(fallback=60), answer(429), 60),
        (Wait(period="hour"), answer(429, retry_after="9"), 9),
        (Wait(), answer(429), None),
    ],
)
def test_a_rules_own_field_states_the_wait_before_the_general_ones_and_its_fallback(wait, came, seconds):
    assert verdict(Rule(K.THROTTLED, wait=wait), came).retry_in == seconds


@pytest.mark.parametrize("wait", [Wait(header="x-reset"), Wait(body="reset")])
def test_a_moment_is_measured_by_the_answers_own_date(wait):
    at = "2026-11-01T13:00:30Z"
    came = answer(429, {"reset": at}, x_reset=at, date="Sun, 01 Nov 2026 13:00:00 GMT")
    assert verdict(Rule(K.THROTTLED, wait=wait), came).retry_in == 30


@pytest.mark.parametrize(
    ("period", "now", "seconds"),
    [
        ("hour", datetime(2026, 11, 1, 12, 59, 30, 500_000, UTC), 29.5),
        ("hour", datetime(2026, 11, 1, 23, tzinfo=UTC), 3_600),
        ("day", datetime(2026, 11, 1, 23, 59, 30, 500_000, UTC), 29.5),
        ("day", datetime(2026, 11, 1, 1, 30, tzinfo=timezone(timedelta(hours=2))), 1_800),  # 23:30 the day before, UTC
        ("month", datetime(2026, 11, 30, 23, 59, 30, 500_000, UTC), 29.5),
        ("month", datetime(2026, 12, 31, 12, tzinfo=UTC), DAY / 2),
        ("month", datetime(2027, 1, 31, tzinfo=UTC), DAY),
        ("month", datetime(2027, 2, 1, tzinfo=UTC), 28 * DAY),
        ("month", datetime(2026, 12, 1, tzinfo=UTC), 31 * DAY),
    ],
)
def test_a_spent_budget_is_full_again_when_its_next_period_begins(monkeypatch, period, now, seconds):
    monkeypatch.setenv("TZ", "XYZ+13")  # wherever the machine stands
    time.tzset()
    try:
        assert verdict(Rule(K.QUOTA, wait=Wait(period=period)), answer(429), now=now).retry_in == seconds
    finally:
        monkeypatch.undo()
        time.tzset()


SPENT = Fields.of({"x-ratelimit-limit": "9", "x-ratelimit-remaining": "3", "x-ratelimit-reset": "600"})


@pytest.mark.parametrize(
    ("rules", "cost", "status", "seconds"),
    [
        ((), 3.0, 429, None),
        ((), 4.0, 429, 600),  # what is left is too little for it
        ((), 4.0, 503, None),  # no fault ends when a budget is full again
        ((Rule(K.QUOTA),), 4.0, 403, 600),
        ((Rule(K.QUOTA),), 3.0, 403, None),
        ((Rule(K.TRANSIENT),), 4.0, 403, None),
    ],
)
def test_a_budget_with_less_left_than_the_request_costs_is_spent(rules, cost, status, seconds):
    failure = classify(AnswerFacts(status, SPENT), replace(GET, cost=cost), dialect(*rules), NOW)
    assert failure.retry_in == seconds


@pytest.mark.parametrize("status", [429, 503])
def test_every_fault_states_its_wait_in_the_providers_own_dialect(status):
    own = Provider(name="p", waits=WaitDialect(hints=(("x-wait", Word.DELTA_MS),)))
    assert classify(answer(status, x_wait="7000"), GET, own, NOW).retry_in == 7
    assert classify(answer(status, x_wait="7000"), GET, GENERIC, NOW).retry_in is None


@pytest.mark.parametrize(
    ("budgets", "kind"),
    [
        ((Budget("a", 9, 0, NOW),), K.THROTTLED),
        ((Budget("a", 9, 5, NOW), Budget("b", 9, 0, NOW)), K.THROTTLED),
        ((Budget("a", 9, 1, NOW),), K.PERMANENT),
        ((Budget("a", 9, 0),), K.PERMANENT),
        ((Budget("a", 9, None, NOW),), K.PERMANENT),
    ],
)
def test_a_403_is_a_throttle_while_some_budget_is_used_up(budgets, kind):
    assert classify(answer(403, budgets=budgets), GET, GENERIC, NOW).kind is kind
    assert classify(answer(404, budgets=budgets), GET, GENERIC, NOW).kind is K.PERMANENT


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"type": "quota-exceeded"}, K.QUOTA),
        ({"type": "https://a.example/#b#quota-exceeded"}, K.QUOTA),
        ({"type": "quota-exceeded#other"}, K.PERMANENT),
        ({"type": 5}, K.PERMANENT),
        (["type"], K.PERMANENT),
    ],
)
def test_a_problem_is_known_by_the_end_of_its_type(body, kind):
    assert classify(answer(403, body, budgets=(Budget("a", 9, 1, NOW),)), GET, GENERIC, NOW).kind is kind
    spent = answer(403, body, budgets=(Budget("a", 9, 0, NOW),))
    assert classify(spent, GET, GENERIC, NOW).kind is (K.THROTTLED if kind is K.PERMANENT else kind)


# -- what is believed --------------------------------------------------------------------------------------------------

WEEKLY = Provider(name="p", limits={"account": [Limit(5, per=7 * DAY)]})
LATE = NOW + timedelta(days=3)


@pytest.mark.parametrize(
    ("failure", "provider", "expected"),
    [
        (Failure(K.THROTTLED, retry_in=3 * DAY), None, Failure(K.THROTTLED, retry_in=DAY)),
        (Failure(K.THROTTLED, retry_in=3 * DAY), GENERIC, Failure(K.THROTTLED, retry_in=DAY)),
        (Failure(K.QUOTA, retry_in=3 * DAY), WEEKLY, Failure(K.QUOTA, retry_in=3 * DAY)),
        (Failure(K.QUOTA, retry_in=8 * DAY), WEEKLY, Failure(K.QUOTA, retry_in=DAY)),
        (Failure(K.THROTTLED, retry_at=LATE), None, Failure(K.THROTTLED, retry_at=NOW + timedelta(days=1))),
        (Failure(K.QUOTA, retry_at=LATE), WEEKLY, Failure(K.QUOTA, retry_at=LATE)),
        (Failure(K.TRANSIENT, retry_in=3 * DAY), None, Failure(K.TRANSIENT, retry_in=3 * DAY)),
        (Failure(K.TRANSIENT, retry_at=LATE), None, Failure(K.TRANSIENT, retry_at=LATE)),
        (Failure(K.THROTTLED), None, Failure(K.THROTTLED)),
    ],
)
def test_a_wait_that_a_handler_raised_is_believed_as_far_as_one_that_was_told(failure, provider, expected):
    assert believed(failure, provider, NOW) == expected


@pytest.mark.parametrize(
    ("cost", "known"),
    [
        (lambda _: 5, 5.0),
        (lambda _: 0, 0.0),
        (lambda _: 0.5, 0.5),
        (lambda _: None, None),
        (lambda _: -1, None),
        (lambda _: float("inf"), None),
        (lambda _: float("nan"), None),
        (lambda _: "5", None),
        (lambda came: came.body["a"], None),
        (lambda came: came.body.a, None),
        (lambda _: float("x"), None),
        (lambda _: 1 / 0, None),
        (lambda _: next(iter(())), None),
        (lambda came: came.status / 100, 2.0),
        (None, None),
    ],
)
def test_what_a_request_really_cost(cost, known):
    found = cost_of(answer(200, {}), Provider(name="p", cost=cost))
    assert (found, type(found)) == (known, type(known))
