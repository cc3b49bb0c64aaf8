"""One call of the client as a generator of steps, written once for coroutines and threads.

A step is a coroutine of the `Conduct`, or one of the words below, which each driver carries out in its own
way. In order: what is this request (`Trail.facts`), may it go (admit), mark it, send it, look at the answer,
tell the engine, and perhaps once more: with fresh credentials after a 401, or, for what is safe to repeat,
after a moment. Redirects are followed by httpx above us, so each hop comes through here as a request of its
own and is judged by its own host.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import httpx

from resilient.core.budgets import Fields, budgets
from resilient.core.classify import classify, cost_of, message_of
from resilient.core.errors import ResourceStopped
from resilient.core.failure import WAITS_FOR_RESOURCE, Failure, FailureKind
from resilient.wire.answer import KEY, Answer
from resilient.wire.explain import by_transport
from resilient.wire.outgoing import Passage, outgoing, plan
from resilient.wire.redact import without_secrets_in_code

if TYPE_CHECKING:
    from resilient.core.budgets import Budget
    from resilient.core.exchange import AnswerFacts
    from resilient.wire.attempt import Repeats
    from resilient.wire.conduct import Conduct, Permit
    from resilient.wire.pool import PoolSettings
    from resilient.wire.trail import Trail


class Send(NamedTuple):
    """Send it, after a last look at its permit; gives the raw response."""

    request: httpx.Request
    conduct: Conduct
    permit: Permit


class Read(NamedTuple):
    """Read the whole body."""

    answer: Answer


class ReadError(NamedTuple):
    """Read the beginning of an error's body; never fails for what the server does."""

    answer: Answer
    request: httpx.Request


class Sleep(NamedTuple):
    """Wait."""

    seconds: float


Step = Send | Read | ReadError | Sleep | Coroutine[Any, Any, Any]
Flow = Generator[Step, Any, Any]


class Outcome(NamedTuple):
    """What became of one physical request."""

    permit: Permit
    answer: Answer | None
    facts: AnswerFacts | None
    failure: Failure | None
    error: httpx.RequestError | None


CLIENT_ERROR: Final = 400


def exchange(trail: Trail, settings: PoolSettings, request: httpx.Request) -> Flow:
    """Send ``request`` as its job may; returns the `Answer` or raises httpx's errors and the Conduct's."""
    started = time.monotonic()
    passage: Passage = yield from _planned(trail, request)
    last: Outcome | None = None
    repeats: Repeats | None = None
    renewed = False
    while True:
        try:
            outcome = yield from _once(trail, settings, request, passage)
        except ResourceStopped:
            if last is None:
                raise
            return _conclude(last)  # the gate closed meanwhile: what came back first is the news
        renewing = not renewed and _may_renew(outcome, passage)
        if renewing:
            try:
                renewed = renewing = yield trail.conduct.refreshed(outcome.permit, cast("Failure", outcome.failure))
            except Exception:  # the engine's database is away, say: the refusal is known all the same
                _clear(trail, outcome)
                raise
        yield from _tell(trail, outcome, None if renewing else outcome.failure)
        if not renewing:
            if outcome.failure is None or outcome.permit.probing or not _may_repeat(outcome, passage):
                return _conclude(outcome)
            if repeats is None:
                from resilient.wire.attempt import Repeats  # noqa: PLC0415 - tenacity: once something failed

                repeats = Repeats(settings, started)
            delay = repeats.next_delay(outcome.failure)
            if delay is None:
                return _conclude(outcome)
            yield Sleep(delay)
        last = outcome


def _planned(trail: Trail, request: httpx.Request) -> Flow:
    """What the request is; an account that was never connected, so that nobody knows its address, waits."""
    if trail.lacks_address and not request.url.scheme:
        yield trail.conduct.connection(trail.account)
    return plan(trail, request)


def _once(trail: Trail, settings: PoolSettings, request: httpx.Request, passage: Passage) -> Flow:
    """One physical request, up to the classification of what came back."""
    asked = passage.asked
    permit: Permit = yield trail.conduct.admit(asked)
    answer = facts = failure = error = None
    try:
        if asked.marked:
            yield trail.conduct.mark(permit)
        started = time.perf_counter()
        try:
            sent = outgoing(request, passage, permit, trail)
            answer = Answer.of((yield Send(sent, trail.conduct, permit)), settings)
            facts, failure = yield from _look(trail, sent, answer, passage)
            if answer.is_closed:
                answer.elapsed = timedelta(seconds=time.perf_counter() - started)
        except httpx.RequestError as caught:
            error, failure = caught, by_transport(caught, repeatable=asked.repeatable)
            caught.request = request
        except ResourceStopped:  # by the last look before its first byte
            if asked.marked and permit.fresh:
                trail.conduct.clear(permit, took_effect=False)
            raise
    except BaseException:
        trail.give_up(asked)
        trail.conduct.abandoned(permit)
        raise
    passage.failure = failure
    trail.note(asked, failure)
    return Outcome(permit, answer, facts, failure, error)


def _look(trail: Trail, sent: httpx.Request, answer: Answer, passage: Passage) -> Flow:
    """Read as much as the classification needs, and classify."""
    provider, asked = trail.provider, passage.asked
    headers, now = fields(answer.headers), trail.conduct.now()
    if answer.status_code >= CLIENT_ERROR:
        yield ReadError(answer, sent)
    elif asked.gated and provider.reads_success and "json" in headers.get("content-type", ""):
        yield Read(answer)
    left: tuple[Budget, ...] = ()
    if asked.gated and not provider.budget_names.isdisjoint(headers):
        left = budgets(headers, now, fields=provider.waits.budgets)
    facts = answer.facts(headers, left)
    if asked.gated and provider.cost is not None:
        facts = replace(facts, cost=cost_of(facts, provider))
    failure = without_secrets_in_code(classify(facts, asked, provider, now), trail.secrets)
    answer.extensions[KEY], answer.secrets = failure, trail.secrets
    if failure is not None:
        answer.said = message_of(facts, provider)
    return facts, failure


def _tell(trail: Trail, outcome: Outcome, failure: Failure | None) -> Flow:
    """Report to the engine, then clear the mark if the outcome is known."""
    permit, asked = outcome.permit, outcome.permit.asked
    try:
        if asked.gated and outcome.facts is not None:
            yield trail.conduct.answered(permit, outcome.facts, failure)
        elif asked.gated and failure is not None:
            yield trail.conduct.failed(permit, failure)
    finally:  # the account is gated, say: the job waits, and what is known about its request is known
        _clear(trail, outcome)


def _clear(trail: Trail, outcome: Outcome) -> None:
    permit, asked, failure = outcome.permit, outcome.permit.asked, outcome.failure
    if asked.marked and concluded(permit, failure, unsent=_unsent(outcome.error)):
        trail.conduct.clear(permit, took_effect=failure is None)
    if (asked.gated or asked.name) and outcome.answer is not None:
        outcome.answer.cut = partial(trail.cut_off, permit)


def concluded(permit: Permit, failure: Failure | None, *, unsent: bool) -> bool:
    """Whether the outcome of a marked request is known.

    With a key a server's failure says nothing yet, and a refusal only if no earlier sending stands unanswered.
    """
    if failure is None or failure.kind is FailureKind.PERMANENT:
        return True
    if permit.asked.needs_mark:
        return failure.kind is not FailureKind.AMBIGUOUS
    return permit.fresh and (unsent or failure.kind in WAITS_FOR_RESOURCE)


def _unsent(error: httpx.RequestError | None) -> bool:
    return isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))


def _may_renew(outcome: Outcome, passage: Passage) -> bool:
    """Refused credentials were ours, and the request can be sent a second time."""
    refused = outcome.failure is not None and outcome.failure.kind is FailureKind.AUTH
    return refused and passage.resendable and passage.asked.trusted and outcome.permit.trusting


def _may_repeat(outcome: Outcome, passage: Passage) -> bool:
    """A passing fault of a request that either has one effect however often it is sent, or was never sent."""
    failure = outcome.failure
    if failure is None or failure.kind is not FailureKind.TRANSIENT or not passage.resendable:
        return False
    return passage.asked.repeatable or (_unsent(outcome.error) and not isinstance(outcome.error, httpx.PoolTimeout))


def _conclude(outcome: Outcome) -> Answer:
    if outcome.error is not None:
        raise outcome.error
    return cast("Answer", outcome.answer)


def fields(headers: httpx.Headers) -> Fields:
    """The headers of an answer, decoded once."""
    return Fields.of((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.raw)
