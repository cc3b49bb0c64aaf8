"""What an exception says, carries and leads to: exact words, since people read them in rows, logs and alerts."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from resilient.core.base.errors import (
    Ambiguous,
    Cancel,
    Failure,
    FailureKind,
    InvalidInput,
    JobFailure,
    Permanent,
    ResourceStopped,
    Scope,
    Snooze,
    Throttled,
    Transient,
    at_scope,
    chain,
)

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
EAST = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (Failure(FailureKind.TRANSIENT), "transient"),
        (Failure(FailureKind.LOST_WORKER), "lost worker"),
        (Failure(FailureKind.TRANSIENT, code="connect_error"), "connect error"),
        (Failure(FailureKind.TRANSIENT, code="http_503", status=503), "HTTP 503"),
    ],
)
def test_a_failure_in_short(failure, text):
    assert str(failure) == text


@pytest.mark.parametrize(
    ("key", "scope", "resource"),
    [
        ("acme/ada/search", Scope.ENDPOINT, "acme/ada/search"),
        ("acme/ada/search", Scope.ACCOUNT, "acme/ada"),
        ("acme/ada/search", Scope.PROVIDER, "acme"),
        ("acme", Scope.ACCOUNT, "acme"),
        ("acme", Scope.ENDPOINT, "acme"),
    ],
)
def test_the_resource_that_a_failure_is_about(key, scope, resource):
    assert at_scope(key, scope) == resource


@pytest.mark.parametrize(
    ("make", "text", "failure"),
    [
        (Transient, "transient failure", Failure(FailureKind.TRANSIENT)),
        (lambda: Transient("later", retry_after=2.5), "later", Failure(FailureKind.TRANSIENT, retry_in=2.5)),
        (Permanent, "permanent failure", Failure(FailureKind.PERMANENT)),
        (lambda: Permanent("gone", code="http_410"), "gone", Failure(FailureKind.PERMANENT, code="http_410")),
        (Throttled, "throttled", Failure(FailureKind.THROTTLED)),
        (lambda: Throttled(retry_after=9), "throttled", Failure(FailureKind.THROTTLED, retry_in=9)),
        (lambda: Throttled(retry_after=timedelta(minutes=1)), "throttled", Failure(FailureKind.THROTTLED, retry_in=60)),
        (
            lambda: Throttled(NOON, scope="provider", message="slow down"),
            "slow down",
            Failure(FailureKind.THROTTLED, Scope.PROVIDER, retry_at=NOON),
        ),
        (Ambiguous, "unknown outcome", Failure(FailureKind.AMBIGUOUS)),
        (lambda: Ambiguous("no answer"), "no answer", Failure(FailureKind.AMBIGUOUS)),
        (lambda: JobFailure("odd", failure=Failure(FailureKind.AUTH)), "odd", Failure(FailureKind.AUTH)),
    ],
)
def test_what_a_handler_raises_says_what_happened(make, text, failure):
    error = make()
    assert (str(error), error.failure) == (text, failure)
    assert (error.resource, error.bare_message) == (None, None)


def test_a_moment_without_a_zone_is_one_of_utc():
    assert Throttled(datetime(2026, 11, 1, 12)).failure.retry_at == NOON  # noqa: DTZ001 - that is the point
    assert Snooze(until=datetime(2026, 11, 1, 12)).until == NOON  # noqa: DTZ001
    shown = Throttled(datetime(2026, 11, 1, 14, tzinfo=EAST)).failure.retry_at
    assert (shown, shown.tzinfo) == (NOON, EAST)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Throttled(60), "until takes a datetime, not 60; for seconds write Throttled(retry_after=...)"),
        (lambda: Throttled(retry_after="60"), "Throttled(retry_after=...) takes seconds or a timedelta, not '60'"),
        (lambda: Transient(retry_after=b"9"), "Transient(retry_after=...) takes seconds or a timedelta, not b'9'"),
        (lambda: Snooze("9"), "Snooze(...) takes seconds or a timedelta, not '9'; for a moment write until=..."),
        (lambda: Snooze(until=60), "until takes a datetime, not 60; for seconds write Snooze(delay=...)"),
    ],
)
def test_seconds_are_no_moment(make, text):
    with pytest.raises(TypeError) as error:
        make()
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda seconds: Transient(retry_after=seconds), "Transient"),
        (lambda seconds: Throttled(retry_after=seconds), "Throttled"),
        (Snooze, "Snooze"),
    ],
)
def test_seconds_are_finite(make, word):
    for seconds in (float("inf"), float("nan")):
        with pytest.raises(InvalidInput) as error:
            make(seconds)
        assert str(error.value) == f"{word}({seconds}): give a finite number of seconds"


def test_an_unknown_scope_is_refused_with_those_there_are():
    with pytest.raises(
        InvalidInput, match=r"Throttled\(scope='acount'\): scope is 'endpoint', 'account' or 'provider'"
    ):
        Throttled(scope="acount")


def test_what_is_no_failure():
    for snooze, delay, until in (
        (Snooze(), None, None),
        (Snooze(2.5), 2.5, None),
        (Snooze(timedelta(minutes=1)), timedelta(minutes=1), None),
        (Snooze(until=NOON), None, NOON),
    ):
        assert (str(snooze), snooze.delay, snooze.until) == ("snoozed", delay, until)
    assert (str(Cancel()), Cancel().reason) == ("cancelled by its handler",) * 2
    assert (str(Cancel("sold")), Cancel("sold").reason) == ("sold", "sold")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("cooldown",), "its cooldown; the job waits and goes on by itself"),
        (("breaker",), "its circuit; the job waits and goes on by itself"),
        (("auth",), "its credentials; the job waits until they are good"),
        (("database",), "our database, which is away; the job waits and goes on by itself"),
        (
            ("limit", datetime(2026, 11, 1, 14, 0, 5, tzinfo=EAST)),
            "its limit until 2026-11-01 12:00:05 UTC; the job waits and goes on by itself",
        ),
    ],
)
def test_a_resource_that_is_stopped_says_by_what(words, text):
    error = ResourceStopped("acme/ada", *words)
    assert str(error) == f"resource 'acme/ada' is stopped by {text}"
    assert (error.resource, error.gate, error.until) == ("acme/ada", *words, *[None] * (2 - len(words)))


def test_where_no_job_waits_it_says_what_follows():
    error = ResourceStopped("acme", "cooldown", then="ask again later")
    assert str(error) == "resource 'acme' is stopped by its cooldown; ask again later"


# -- chains ------------------------------------------------------------------------------------------------------------


def error_of(name, cause=None, context=None):
    made = ValueError(name)
    made.__cause__, made.__context__ = cause, context
    return made


def test_a_chain_is_the_error_then_members_of_a_group_then_its_cause_then_what_was_handled():
    first = error_of("first", error_of("its cause", error_of("deeper")), error_of("its context"))
    group = ExceptionGroup("group", [first, ExceptionGroup("inner", [error_of("second"), error_of("third")])])
    group.__cause__, group.__context__ = error_of("cause"), error_of("context")
    texts = [one.args[0] for one in chain(group)]
    assert texts == [
        "group", "first", "its cause", "deeper", "its context", "inner", "second", "third", "cause", "context",
    ]  # fmt: skip


def test_each_of_a_chain_comes_once():
    both = error_of("both")
    last = error_of("last")
    first = error_of("first", both, error_of("next", both, last))
    both.__cause__ = first
    assert [str(one) for one in chain(first)] == ["first", "both", "next", "last"]


def test_a_chain_ends_after_a_hundred():
    error = error_of(0)
    for number in range(1, 101):
        error = error_of(number, error)
    assert [one.args[0] for one in chain(error)] == list(range(100, 0, -1))
    assert [one.args[0] for one in chain(error.__cause__)] == list(range(99, -1, -1))
