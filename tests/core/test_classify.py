"""The classification table, line by line, and the dialects that overrule it."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.base.budgets import Budget, Fields
from resilient.core.base.errors import FailureKind as K
from resilient.core.base.errors import Scope
from resilient.core.base.exchange import AnswerFacts, RequestFacts
from resilient.core.base.instants import Word
from resilient.core.gates.retry_after import WaitDialect
from resilient.core.provider.classify import Phase, classify, classify_error, message_of
from resilient.core.provider.facts import GENERIC, Provider
from resilient.core.provider.rules import Errors, Rule, Wait

NOW = datetime(2026, 11, 1, 12, 0, tzinfo=UTC)
GET = RequestFacts("GET", "https://api.example.com/x", "api.example.com", "/x", key="api/acct")
POST = RequestFacts("POST", "https://api.example.com/x", "api.example.com", "/x", repeatable=False)
KEYED = RequestFacts("POST", "https://api.example.com/x", "api.example.com", "/x", idempotency_key="k")


def answer(status, body=None, text="", budgets=(), **headers):
    named = Fields.of({name.replace("_", "-"): value for name, value in headers.items()})
    return AnswerFacts(status, named, body=body, text=text, budgets=budgets)


def kind(status, asked=GET, provider=GENERIC, **facts):
    failure = classify(answer(status, **facts), asked, provider, NOW)
    return None if failure is None else failure.kind


@pytest.mark.parametrize("status", [200, 201, 204, 206, 301, 304, 307])
def test_below_400_is_no_failure(status):
    assert kind(status) is None


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        *((s, K.PERMANENT) for s in (400, 402, 403, 404, 405, 406, 410, 411, 413, 414, 415, 422, 451, 499)),
        *((s, K.PERMANENT) for s in (501, 505, 510)),
        (401, K.AUTH),
        *((s, K.TRANSIENT) for s in (408, 425, 500, 502, 503, 504, 507, 511, 529, 599)),
        *((s, K.TRANSIENT) for s in range(520, 531)),
        *((s, K.CONFLICT) for s in (409, 412, 423)),
        (429, K.THROTTLED),
        (509, K.THROTTLED),
    ],
)
def test_statuses_of_an_idempotent_request(status, expected):
    assert kind(status) is expected
    failure = classify(answer(status), GET, GENERIC, NOW)
    assert failure.code == f"http_{status}"
    assert failure.status == status


@pytest.mark.parametrize("status", [502, 504, 520, 524])
def test_a_gateway_that_lost_the_answer_makes_a_post_ambiguous_unless_it_is_keyed(status):
    assert kind(status, POST) is K.AMBIGUOUS
    assert kind(status, KEYED) is K.TRANSIENT
    assert kind(status, GET) is K.TRANSIENT


@pytest.mark.parametrize("status", [500, 503, 408, 425, 521, 522, 523, 525, 530])
def test_an_answered_post_is_not_ambiguous(status):
    assert kind(status, POST) is K.TRANSIENT


@pytest.mark.parametrize("status", [400, 401, 404, 409, 429, 422])
def test_the_method_makes_no_difference_to_a_refusal(status):
    assert kind(status, POST) is kind(status, GET)


@pytest.mark.parametrize(
    ("status", "wide"),
    [
        (500, True),
        (502, True),
        (503, True),
        (408, True),
        (425, False),
        (429, False),
        (401, False),
        (404, False),
        (501, False),
    ],
)
def test_what_proves_the_provider_ill(status, wide):
    assert classify(answer(status), GET, GENERIC, NOW).provider_wide is wide


# -- waits ---------------------------------------------------------------------------------------------------


def wait_of(status, provider=GENERIC, asked=GET, **facts):
    return classify(answer(status, **facts), asked, provider, NOW).retry_in


def test_retry_after_is_kept_as_seconds():
    assert wait_of(429, retry_after="30") == 30
    assert wait_of(503, retry_after="7") == 7
    assert wait_of(409, retry_after="3") == 3


def test_an_http_date_is_measured_by_the_answers_own_date():
    skewed = {"date": "Sun, 01 Nov 2026 13:00:00 GMT", "retry-after": "Sun, 01 Nov 2026 13:01:00 GMT"}
    failure = classify(AnswerFacts(429, Fields.of(skewed)), GET, GENERIC, NOW)
    assert failure.retry_in == 60
    assert failure.retry_at is None


@pytest.mark.parametrize("garbage", ["", "soon", "-5", "0", "nan", "1e3", "٣"])
def test_garbage_is_no_hint(garbage):
    assert wait_of(429, retry_after=garbage) is None


def test_a_spent_budgets_reset_is_a_hint_for_a_throttle_but_not_for_a_fault():
    spent = {"x_ratelimit_remaining": "0", "x_ratelimit_reset": "600", "x_ratelimit_limit": "100"}
    assert wait_of(429, **spent) == 600
    assert wait_of(503, **spent) is None


def test_403_with_a_spent_budget_is_a_throttle():
    spent = (Budget("core", 5000, 0, NOW + timedelta(minutes=5)),)
    left = (Budget("core", 5000, 1, NOW + timedelta(minutes=5)),)
    assert kind(403, budgets=spent) is K.THROTTLED
    assert kind(403, budgets=left) is K.PERMANENT
    assert kind(403) is K.PERMANENT


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quota-exceeded", K.QUOTA),
        ("temporary-reduced-capacity", K.THROTTLED),
        ("abnormal-usage-detected", K.THROTTLED),
    ],
)
def test_problem_types_of_the_rate_limit_draft(name, expected):
    body = {"type": f"https://iana.org/assignments/http-problem-types#{name}"}
    assert kind(429, body=body) is expected
    assert kind(503, body=body) is expected


# -- requests without an answer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "repeatable", "expected", "wide"),
    [
        (Phase.POOL, False, K.TRANSIENT, False),
        (Phase.CONNECT, False, K.TRANSIENT, True),
        (Phase.TLS, True, K.PERMANENT, False),
        (Phase.UNSENDABLE, True, K.PERMANENT, False),
        (Phase.UNREADABLE, True, K.PERMANENT, False),
        (Phase.WRITE, True, K.TRANSIENT, True),
        (Phase.WRITE, False, K.AMBIGUOUS, True),
        (Phase.READ, True, K.TRANSIENT, True),
        (Phase.READ, False, K.AMBIGUOUS, True),
    ],
)
def test_errors_by_phase(phase, repeatable, expected, wide):
    failure = classify_error(phase, repeatable=repeatable)
    assert (failure.kind, failure.provider_wide) == (expected, wide)


def test_a_pool_timeout_never_counts_for_a_breaker():
    assert classify_error(Phase.POOL, repeatable=True).counts_for_breaker is False


# -- dialects: each of these APIs answers in its own way -------------------------------------------------------

SLACK = Provider(
    name="slack",
    errors=Errors(
        code=("error",),
        rules=(
            Rule(K.THROTTLED, status=(200, 429), code=("ratelimited", "rate_limited")),
            Rule(K.AUTH, status=200, code=("token_expired", "invalid_auth", "token_revoked")),
            Rule(K.AMBIGUOUS, status=200, code=("internal_error", "fatal_error")),
            Rule(K.TRANSIENT, status=200, code=("service_unavailable", "request_timeout")),
            Rule(K.PERMANENT, status=200, where={"ok": False}),
        ),
    ),
)
GITHUB = Provider(
    name="github",
    waits=WaitDialect(),
    errors=Errors(
        rules=(
            Rule(K.QUOTA, status=(403, 429),
                 header={"x-ratelimit-remaining": "^0$", "x-ratelimit-resource": "^search$"},
                 scope=Scope.ENDPOINT, wait=Wait(header="x-ratelimit-reset", word=Word.EPOCH_S)),
            Rule(K.QUOTA, status=(403, 429), header={"x-ratelimit-remaining": "^0$"},
                 wait=Wait(header="x-ratelimit-reset", word=Word.EPOCH_S)),
            Rule(K.THROTTLED, status=(403, 429), header={"retry-after": "."}),
            Rule(K.THROTTLED, status=(403, 429), text="secondary rate", wait=Wait(fallback=60)),
        ),
    ),
)  # fmt: skip
STRIPE = Provider(
    name="stripe",
    errors=Errors(
        code=("error.code", "error.type"),
        rules=(
            Rule(K.PERMANENT, header={"stripe-should-retry": "^false$"}),
            Rule(K.CONFLICT, status=429, code="lock_timeout"),
            Rule(K.TRANSIENT, status=409, header={"stripe-should-retry": "^true$"}),
        ),
    ),
)
GOOGLE = Provider(
    name="google",
    errors=Errors(
        code=("error.errors[].reason", "error.status"),
        rules=(
            Rule(K.THROTTLED, status=(403, 429), code=("rateLimitExceeded", "userRateLimitExceeded"),
                 wait=Wait(text=r"Retry after (?P<value>[0-9TZ:.+-]+)", word=Word.ISO8601)),
            Rule(K.QUOTA, status=403, code=("quotaExceeded", "dailyLimitExceeded"), wait=Wait(period="day")),
            Rule(K.RESET_CURSOR, status=404, path="*/history"),
            Rule(K.PERMANENT, status=410, code="deleted"),
            Rule(K.RESET_CURSOR, status=410),
        ),
    ),
)  # fmt: skip
SHOPIFY = Provider(
    name="shopify",
    errors=Errors(
        code=("errors[].extensions.code",),
        rules=(
            Rule(K.THROTTLED, status=200, code="THROTTLED", wait=Wait(seconds=lambda body: (
                (cost := body["extensions"]["cost"])["requestedQueryCost"]
                - cost["throttleStatus"]["currentlyAvailable"]) / cost["throttleStatus"]["restoreRate"])),
            Rule(K.THROTTLED, status=430, wait=Wait(fallback=60)),
            Rule(K.PERMANENT, status=200, where={"errors": ...}),
        ),
    ),
)  # fmt: skip
DISCORD = Provider(
    name="discord",
    errors=Errors(
        code=("code",),
        rules=(
            Rule(K.QUOTA, status=429, json=False),
            Rule(K.THROTTLED, status=429, where={"global": True}, scope=Scope.PROVIDER,
                 wait=Wait(body="retry_after", word=Word.DELTA_S_FLOAT)),
            Rule(K.THROTTLED, status=429, scope=Scope.ENDPOINT, wait=Wait(body="retry_after", word=Word.DELTA_S_FLOAT)),
        ),
    ),
)  # fmt: skip
AWS = Provider(
    name="aws",
    errors=Errors(
        code=("__type", "Error.Code"), code_header="x-amzn-errortype", code_text="<Code>([^<]+)</Code>",
        code_form=r"(?:.*#)?([^:#]+)",
        rules=(
            Rule(K.THROTTLED, status=(400, 429, 503), code=("Throttling*", "SlowDown", "TooManyRequestsException")),
            Rule(K.CONFLICT, code="ConditionalCheckFailedException"),
            Rule(K.AUTH, code=("ExpiredToken*",)),
        ),
    ),
)  # fmt: skip
LINEAR = Provider(
    name="linear",
    waits=WaitDialect(hints=(("x-ratelimit-requests-reset", Word.EPOCH_MS),)),
    errors=Errors(
        code=("errors[].extensions.code", "errors[].extensions.type"),
        rules=(
            Rule(K.THROTTLED, status=(200, 400), code="RATELIMITED"),
            Rule(K.AUTH, status=(200, 400), code="authentication error"),
            Rule(K.PERMANENT, status=200, where={"errors": ...}),
        ),
    ),
)
DROPBOX = Provider(
    name="dropbox",
    errors=Errors(
        code=("error['.tag']", "error.reason['.tag']"),
        rules=(
            Rule(K.CONFLICT, status=429, code="too_many_write_operations", wait=Wait(body="error.retry_after")),
            Rule(K.THROTTLED, status=429, wait=Wait(body="error.retry_after", fallback=5)),
            Rule(K.RESET_CURSOR, status=409, code="reset"),
            Rule(K.PERMANENT, status=409),
        ),
    ),
)
HUBSPOT = Provider(
    name="hubspot",
    errors=Errors(
        code=("policyName", "category"),
        rules=(
            Rule(K.QUOTA, status=429, code="DAILY", wait=Wait(period="day")),
            Rule(K.THROTTLED, status=429, code="TEN_SECONDLY_ROLLING", wait=Wait(fallback=10)),
            Rule(K.THROTTLED, status=429, code="SECONDLY", wait=Wait(fallback=1)),
            Rule(K.AUTH, status=530),
        ),
    ),
)
MATRIX = Provider(
    name="matrix",
    errors=Errors(
        code=("errcode",),
        rules=(
            Rule(K.AUTH, status=401, code="M_UNKNOWN_TOKEN", where={"soft_logout": True}),
            Rule(K.THROTTLED, status=429, wait=Wait(body="retry_after_ms", word=Word.DELTA_MS)),
            Rule(K.QUOTA, code="M_RESOURCE_LIMIT_EXCEEDED"),
        ),
    ),
)
MAILCHIMP = Provider(name="mailchimp", errors=Errors(rules=(Rule(K.THROTTLED, status=(403, 429), json=False),)))
ZOOM = Provider(
    name="zoom",
    waits=WaitDialect(retry_after=Word.ISO8601),
    errors=Errors(
        rules=(
            Rule(K.QUOTA, status=429, header={"x-ratelimit-type": "Daily"}),
            Rule(K.CONFLICT, status=429, where={"message": "Too many concurrent requests"}),
        ),
    ),
)
NOT_AN_ERROR = Provider(name="upsert", errors=Errors(rules=(Rule(None, status=409, where={"exists": True}),)))

_COST = {
    "extensions": {
        "cost": {"requestedQueryCost": 500, "throttleStatus": {"currentlyAvailable": 100, "restoreRate": 50}}
    }
}
_REASON = {"error": {"errors": [{"reason": "userRateLimitExceeded"}], "message": "Retry after 2026-11-01T12:00:42Z"}}


@pytest.mark.parametrize(
    ("provider", "status", "facts", "expected", "code", "wait"),
    [
        (SLACK, 200, {"body": {"ok": True}}, None, None, None),
        (SLACK, 200, {"body": {"ok": False, "error": "ratelimited"}}, K.THROTTLED, "ratelimited", None),
        (SLACK, 429, {"body": {"ok": False, "error": "ratelimited"}, "retry_after": "30"},
         K.THROTTLED, "ratelimited", 30),
        (SLACK, 200, {"body": {"ok": False, "error": "token_expired"}}, K.AUTH, "token_expired", None),
        (SLACK, 200, {"body": {"ok": False, "error": "channel_not_found"}}, K.PERMANENT, "channel_not_found", None),
        (GITHUB, 403, {"x_ratelimit_remaining": "0", "x_ratelimit_reset": "1793534460"}, K.QUOTA, "http_403", 60),
        (GITHUB, 403, {"x_ratelimit_remaining": "12", "retry_after": "5"}, K.THROTTLED, "http_403", 5),
        (GITHUB, 403, {"text": "You exceeded a secondary rate limit"}, K.THROTTLED, "http_403", 60),
        (GITHUB, 403, {"text": "Resource not accessible by integration"}, K.PERMANENT, "http_403", None),
        (STRIPE, 429, {"body": {"error": {"code": "rate_limit"}}}, K.THROTTLED, "rate_limit", None),
        (STRIPE, 429, {"body": {"error": {"code": "lock_timeout"}}}, K.CONFLICT, "lock_timeout", None),
        (STRIPE, 500, {"stripe_should_retry": "false"}, K.PERMANENT, "http_500", None),
        (STRIPE, 409, {"stripe_should_retry": "true"}, K.TRANSIENT, "http_409", None),
        (GOOGLE, 403, {"body": _REASON, "text": str(_REASON)}, K.THROTTLED, "userRateLimitExceeded", 42),
        (GOOGLE, 403, {"body": {"error": {"errors": [{"reason": "dailyLimitExceeded"}]}}},
         K.QUOTA, "dailyLimitExceeded", 43200),
        (GOOGLE, 403, {"body": {"error": {"errors": [{"reason": "forbidden"}]}}}, K.PERMANENT, "forbidden", None),
        (GOOGLE, 410, {}, K.RESET_CURSOR, "http_410", None),
        (GOOGLE, 410, {"body": {"error": {"errors": [{"reason": "deleted"}]}}}, K.PERMANENT, "deleted", None),
        (SHOPIFY, 200, {"body": {"errors": [{"extensions": {"code": "THROTTLED"}}], **_COST}},
         K.THROTTLED, "THROTTLED", 8),
        (SHOPIFY, 200, {"body": {"errors": [{"extensions": {"code": "THROTTLED"}}]}}, K.THROTTLED, "THROTTLED", None),
        (SHOPIFY, 200, {"body": {"errors": [{"message": "no"}]}}, K.PERMANENT, "http_200", None),
        (SHOPIFY, 200, {"body": {"errors": [], "data": {}}}, None, None, None),
        (SHOPIFY, 430, {}, K.THROTTLED, "http_430", 60),
        (DISCORD, 429, {"body": {"retry_after": 1.5, "global": True}}, K.THROTTLED, "http_429", 1.5),
        (DISCORD, 429, {"text": "<html>banned", "retry_after": "3600"}, K.QUOTA, "http_429", 3600),
        (AWS, 400, {"body": {"__type": "com.amazon.coral#ThrottlingException"}},
         K.THROTTLED, "ThrottlingException", None),
        (AWS, 400, {"x_amzn_errortype": "ConditionalCheckFailedException:http://x"},
         K.CONFLICT, "ConditionalCheckFailedException", None),
        (AWS, 503, {"text": "<Error><Code>SlowDown</Code></Error>"}, K.THROTTLED, "SlowDown", None),
        (AWS, 400, {"body": {"__type": "ValidationException"}}, K.PERMANENT, "ValidationException", None),
        (LINEAR, 400, {"body": {"errors": [{"extensions": {"code": "RATELIMITED"}}]},
                       "x_ratelimit_requests_reset": "1793534430000"}, K.THROTTLED, "RATELIMITED", 30),
        (LINEAR, 200, {"body": {"errors": [{"extensions": {"type": "authentication error"}}]}},
         K.AUTH, "authentication error", None),
        (DROPBOX, 429, {"body": {"error": {"reason": {".tag": "too_many_write_operations"}, "retry_after": 2}}},
         K.CONFLICT, "too_many_write_operations", 2),
        (DROPBOX, 429, {"body": {"error": {"reason": {".tag": "too_many_requests"}}}},
         K.THROTTLED, "too_many_requests", 5),
        (DROPBOX, 409, {"body": {"error": {".tag": "reset"}}}, K.RESET_CURSOR, "reset", None),
        (DROPBOX, 409, {"body": {"error": {".tag": "path"}}}, K.PERMANENT, "path", None),
        (HUBSPOT, 429, {"body": {"policyName": "DAILY"}}, K.QUOTA, "DAILY", 43200),
        (HUBSPOT, 429, {"body": {"policyName": "TEN_SECONDLY_ROLLING"}}, K.THROTTLED, "TEN_SECONDLY_ROLLING", 10),
        (HUBSPOT, 530, {}, K.AUTH, "http_530", None),
        (MATRIX, 429, {"body": {"errcode": "M_LIMIT_EXCEEDED", "retry_after_ms": 2500}},
         K.THROTTLED, "M_LIMIT_EXCEEDED", 2.5),
        (MATRIX, 403, {"body": {"errcode": "M_RESOURCE_LIMIT_EXCEEDED"}}, K.QUOTA, "M_RESOURCE_LIMIT_EXCEEDED", None),
        (MAILCHIMP, 403, {"text": "<html>"}, K.THROTTLED, "http_403", None),
        (MAILCHIMP, 403, {"body": {"title": "User Disabled"}}, K.PERMANENT, "http_403", None),
        (ZOOM, 429, {"x_ratelimit_type": "Daily-limit", "retry_after": "2026-11-02T00:00:00Z"},
         K.QUOTA, "http_429", 43200),
        (ZOOM, 429, {"body": {"message": "Too many concurrent requests"}}, K.CONFLICT, "http_429", None),
        (NOT_AN_ERROR, 409, {"body": {"exists": True}}, None, None, None),
        (NOT_AN_ERROR, 409, {"body": {"exists": 1}}, K.CONFLICT, "http_409", None),
    ],
    ids=lambda value: value.name if isinstance(value, Provider) else None,
)  # fmt: skip
def test_dialects(provider, status, facts, expected, code, wait):
    failure = classify(answer(status, **facts), GET, provider, NOW)
    if expected is None:
        assert failure is None
        return
    assert (failure.kind, failure.code) == (expected, code)
    assert failure.retry_in == (None if wait is None else pytest.approx(wait))


def test_a_rule_names_the_scope():
    spent = {"x_ratelimit_remaining": "0", "x_ratelimit_reset": "1793534460"}
    assert classify(answer(403, **spent), GET, GITHUB, NOW).scope is Scope.ACCOUNT
    assert classify(answer(403, **spent, x_ratelimit_resource="search"), GET, GITHUB, NOW).scope is Scope.ENDPOINT
    whole = answer(429, body={"global": True, "retry_after": 1})
    assert classify(whole, GET, DISCORD, NOW).scope is Scope.PROVIDER
    assert classify(answer(429, body={"global": False}), GET, DISCORD, NOW).scope is Scope.ENDPOINT


def test_a_rule_may_depend_on_the_requests_path():
    history = RequestFacts("GET", "https://x/gmail/v1/users/me/history", "x", "/gmail/v1/users/me/history")
    assert kind(404, history, GOOGLE) is K.RESET_CURSOR
    assert kind(404, GET, GOOGLE) is K.PERMANENT


def test_a_dialects_ambiguity_ends_where_a_repeat_is_harmless():
    fatal = {"body": {"ok": False, "error": "fatal_error"}}
    assert kind(200, POST, SLACK, **fatal) is K.AMBIGUOUS
    assert kind(200, KEYED, SLACK, **fatal) is K.TRANSIENT


def test_only_dialects_that_name_a_success_make_anybody_read_one():
    assert SLACK.errors.reads_success
    assert SHOPIFY.errors.reads_success
    assert not GITHUB.errors.reads_success
    assert not NOT_AN_ERROR.errors.reads_success


def test_messages_are_one_bounded_line():
    assert message_of(answer(422, body={"message": "no\n such  field"}), GENERIC) == "no such field"
    assert len(message_of(answer(422, body={"error": {"message": "x" * 90_000}}), GENERIC)) == 16 * 1024
    assert message_of(answer(422, body=["?"]), GENERIC) == ""


@pytest.mark.parametrize("body", [None, [], {}, "text", 3, {"error": None}, {"error": []}, [[[]]], {"errors": "no"}])
def test_bodies_of_any_shape_are_no_trouble(body):
    for provider in (SLACK, GITHUB, STRIPE, GOOGLE, SHOPIFY, DISCORD, AWS, LINEAR, DROPBOX, HUBSPOT, MATRIX, ZOOM):
        for status in (200, 400, 403, 409, 429, 500):
            classify(answer(status, body=body), POST, provider, NOW)


@pytest.mark.parametrize("hint", [{"retry-after": "1"}, {}])
def test_overload_without_429_is_a_throttle_where_the_facts_say_so(hint):
    """So it teaches a limit as a 429 does."""
    rule = Rule(K.THROTTLED, status=503, header={"x-overload": "."})
    provider = Provider(name="p", base_url="https://p.example", anonymous=True, errors=Errors(rules=(rule,)))
    overload = classify(AnswerFacts(503, Fields.of({"x-overload": "1", **hint})), GET, provider, NOW)
    assert overload.kind == K.THROTTLED
    assert overload.retry_in == (1.0 if hint else None)
    assert classify(AnswerFacts(503, Fields.of(hint)), GET, provider, NOW).kind == K.TRANSIENT


@pytest.mark.parametrize(("repeatable", "kind"), [(True, K.TRANSIENT), (False, K.AMBIGUOUS)])
@pytest.mark.parametrize("status", [0, -1, 99])
def test_a_status_that_is_none_is_no_success(status, repeatable, kind):
    """Some clients say 0 where no answer came."""
    request = RequestFacts("POST", "", "", "", repeatable=repeatable)
    failure = classify(AnswerFacts(status), request, Provider(name="p"), NOW)
    assert (failure.kind, failure.code) == (kind, f"http_{status}")
