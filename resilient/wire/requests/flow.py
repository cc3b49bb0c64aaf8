"""One call of the client as a generator of steps, written once for coroutines and threads; and what it sends.

A step is a coroutine of the `RequestHooks`, or one of the words below, which each driver carries out in its own
way. In order: what is this request (`RequestLog.facts`), may it go (admit), mark it, send it, look at the answer,
report to the engine, and perhaps once more: with fresh credentials after a 401, or, for what is safe to repeat,
after a moment. Httpx follows redirects above this, so each hop comes through here as a request of its own and
is judged by its own host.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import httpx

from resilient.core.base.budgets import Fields, budgets, counted_for
from resilient.core.base.errors import WAITS_FOR_RESOURCE, Failure, FailureKind, InvalidInput, ResourceStopped
from resilient.core.base.phrases import fits_header
from resilient.core.provider.classify import classify, cost_of, message_of
from resilient.wire.requests import span as spans
from resilient.wire.requests.answer import KEY, Answer
from resilient.wire.requests.explain import by_transport
from resilient.wire.requests.guard import GUARDED
from resilient.wire.requests.http11 import host_of, without_value
from resilient.wire.requests.redact import without_secrets_in_code
from resilient.wire.requests.request_log import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenacity import Retrying

    from resilient.core.base.budgets import Budget
    from resilient.core.base.exchange import AnswerFacts, RequestFacts
    from resilient.core.base.tracing import Span
    from resilient.wire.requests.hooks import Permit, RequestHooks
    from resilient.wire.requests.pool import PoolSettings
    from resilient.wire.requests.request_log import RequestLog


class Send(NamedTuple):
    """Send it, after a last look at its permit; the step's result is the raw response."""

    request: httpx.Request
    hooks: RequestHooks
    permit: Permit


class Read(NamedTuple):
    """Read the whole body."""

    answer: Answer


class ReadError(NamedTuple):
    """Read the beginning of an error's body; never fails for what the server does."""

    answer: Answer
    request: httpx.Request


class Close(NamedTuple):
    """Give up an answer that the caller will not get, to free its connection; never fails."""

    answer: Answer


class Sleep(NamedTuple):
    """Wait."""

    seconds: float


Step = Send | Read | ReadError | Close | Sleep | Coroutine[Any, Any, Any]
Flow = Generator[Step, Any, Any]


class Outcome(NamedTuple):
    """What became of one physical request."""

    permit: Permit
    answer: Answer | None
    answer_facts: AnswerFacts | None
    failure: Failure | None
    error: httpx.RequestError | None


CLIENT_ERROR: Final = 400


def exchange(request_log: RequestLog, settings: PoolSettings, request: httpx.Request) -> Flow:
    """Send ``request`` when its job may; returns the `Answer`. Raises httpx's errors and the hooks'."""
    started = time.monotonic()
    state: CallState = yield from _plan(request_log, request)
    try:
        return (yield from _tries(request_log, settings, request, state, started))
    finally:  # only now: until then the repeats of this call are its only repeats
        if state.has_outcome:
            request_log.settle(state.facts, state.failure)
        else:
            request_log.give_up(state.facts)


def _tries(
    request_log: RequestLog, settings: PoolSettings, request: httpx.Request, state: CallState, started: float
) -> Flow:
    """Send it until there is an outcome for the caller."""
    last: Outcome | None = None
    repeats = Repeats(settings, started)
    renewed = False
    while True:
        try:
            outcome = yield from _once(request_log, settings, request, state)
        except ResourceStopped:
            if last is None:
                raise
            return _conclude(last)  # the gate closed meanwhile: the answer before is what the caller gets
        renewing = not renewed and _may_renew(outcome, state)
        try:
            if renewing:
                renewed = renewing = yield from _renew(request_log, outcome)
            yield from _report(request_log, outcome, None if renewing else outcome.failure)
            delay = 0.0 if renewing else _delay(outcome, state, repeats)
            if delay is None:
                return _conclude(outcome)
            yield from _let_go(request, outcome.answer)
            if delay:
                yield Sleep(delay)
        except BaseException as error:
            yield from _close(outcome.answer, error)
            raise
        last = None if renewing else outcome  # a refusal of credentials that are replaced is nobody's answer


def _renew(request_log: RequestLog, outcome: Outcome) -> Flow:
    """Replace the refused credentials; returns whether there are newer ones."""
    try:
        return (yield request_log.hooks.refreshed(outcome.permit, cast("Failure", outcome.failure)))
    except BaseException:  # the database is away, or the job is interrupted; the refusal is still an outcome
        _clear(request_log, outcome)
        request_log.hooks.abandoned(outcome.permit)
        raise


def _delay(outcome: Outcome, state: CallState, repeats: Repeats) -> float | None:
    """Seconds until the request is repeated; None if it is not."""
    if outcome.failure is None or outcome.permit.probing or not _may_repeat(outcome, state):
        return None
    return repeats.next_delay(outcome.failure)


def _let_go(request: httpx.Request, answer: Answer | None) -> Flow:
    """Free the connection of an answer whose request is repeated: the caller gets it only if the repeat is stopped."""
    if answer is not None and not answer.is_closed:
        yield ReadError(answer, request)


def _close(answer: Answer | None, error: BaseException) -> Flow:
    """Free the connection of an answer that nobody gets because of ``error``."""
    if answer is not None and not answer.is_closed and not isinstance(error, GeneratorExit):
        yield Close(answer)


def _plan(request_log: RequestLog, request: httpx.Request) -> Flow:
    """The state of a new call; see `require_connection`."""
    if request_log.is_unconnected:
        yield from require_connection(request_log, request.url.scheme, host_of(request.url), request.url.port)
    return plan(request_log, request)


def require_connection(request_log: RequestLog, scheme: str = "", host: str = "", port: int | None = None) -> Flow:
    """Raise `ResourceStopped` for an account without a connection that needs one, or that got one while its job runs.

    Then the job begins anew: address and headers were looked up before. A request to a foreign host needs neither.
    """
    if scheme and not request_log.origins.holds(scheme, host, port):
        return
    if (yield request_log.hooks.connection(request_log.account)) is not None:
        raise ResourceStopped(request_log.account, "auth")


def _once(request_log: RequestLog, settings: PoolSettings, request: httpx.Request, state: CallState) -> Flow:
    """One physical request, up to the classification of what came back."""
    facts = state.facts
    permit: Permit = yield request_log.hooks.admit(facts)
    state.has_outcome = False
    answer = answer_facts = failure = error = span = None
    sent_request = request
    try:
        if facts.marked:
            yield request_log.hooks.mark(permit)
        permit.sent_at = started = time.perf_counter()
        if request_log.tracing.tracer() is not None:
            span = spans.begin(request_log, facts, state.sendings)
        state.sendings += 1
        try:
            sent_request = outgoing(request, state, permit, request_log, span)
            response = yield Send(sent_request, request_log.hooks, permit)
            answer = Answer.of(response, settings, request_log.account, repeatable=facts.repeatable)
            answer_facts, failure = yield from _classified(request_log, sent_request, answer, state)
            if answer.is_closed:
                answer.elapsed = timedelta(seconds=time.perf_counter() - started)
        except httpx.RequestError as caught:
            error, failure = _without_values(caught, sent_request), by_transport(caught, repeatable=facts.repeatable)
            error.request = request
        except ResourceStopped:  # by the last look before its first byte
            if facts.marked and permit.fresh:
                request_log.hooks.clear(permit, took_effect=False)
            raise
    except BaseException as reason:
        if span is not None:
            spans.end(span, error=reason)
        request_log.hooks.abandoned(permit)
        yield from _close(answer, reason)
        raise
    if span is not None:
        words = (None, b"") if answer is None else (answer.status_code, answer.extensions.get("http_version", b""))
        spans.end(span, status=words[0], version=words[1], failure=failure, error=error)
    state.failure, state.has_outcome = failure, True
    request_log.note(facts, failure)
    return Outcome(permit, answer, answer_facts, failure, error)


def _without_values(error: httpx.RequestError, sent_request: httpx.Request) -> httpx.RequestError:
    """The error; if it may quote a header's value, one without that and without the causes, which quote it, too."""
    if not isinstance(error, httpx.LocalProtocolError):
        return error
    return httpx.LocalProtocolError(without_value(str(error), sent_request.headers.raw))


def _classified(request_log: RequestLog, sent_request: httpx.Request, answer: Answer, state: CallState) -> Flow:
    """The facts of an answer and its classification; reads as much of the body as that needs."""
    provider, facts = request_log.provider, state.facts
    headers, now = fields(answer.headers), request_log.hooks.now()
    if answer.status_code >= CLIENT_ERROR:
        yield ReadError(answer, sent_request)
    elif facts.gated and provider.reads_success and "json" in headers.get("content-type", ""):
        yield Read(answer)
    server_budgets: tuple[Budget, ...] = ()
    if facts.gated and not provider.budget_names.isdisjoint(headers):
        server_budgets = budgets(headers, now, fields=provider.waits.budgets)
    answer_facts = answer.facts(headers, server_budgets)
    if facts.gated and (name := counted_for(headers, fields=provider.waits.budgets)):
        answer_facts = replace(answer_facts, budget=name)
    if facts.gated and provider.cost is not None:
        answer_facts = replace(answer_facts, cost=cost_of(answer_facts, provider))
    failure = without_secrets_in_code(classify(answer_facts, facts, provider, now), request_log.secrets)
    answer.extensions[KEY], answer.secrets = failure, request_log.secrets
    if failure is not None:
        answer.message = message_of(answer_facts, provider)
    return answer_facts, failure


def _report(request_log: RequestLog, outcome: Outcome, failure: Failure | None) -> Flow:
    """Report to the engine, then clear the mark if the outcome is known."""
    permit, request = outcome.permit, outcome.permit.request
    try:
        if request.gated and outcome.answer_facts is not None:
            yield request_log.hooks.answered(permit, outcome.answer_facts, failure)
        elif request.gated and failure is not None:
            yield request_log.hooks.failed(permit, failure)
    finally:  # also if reporting raises (the account is gated, say): the outcome of the request is certain
        _clear(request_log, outcome)


def _clear(request_log: RequestLog, outcome: Outcome) -> None:
    permit, request, failure = outcome.permit, outcome.permit.request, outcome.failure
    if request.marked and is_concluded(permit, failure, unsent=_unsent(outcome.error)):
        request_log.hooks.clear(permit, took_effect=failure is None)
    if (request.gated or request.name) and outcome.answer is not None:
        outcome.answer.cut = partial(request_log.cut_off, permit)


def is_concluded(permit: Permit, failure: Failure | None, *, unsent: bool) -> bool:
    """Whether the outcome of a marked request is known.

    With a key a server's failure settles nothing, and a refusal only if no earlier sending is unanswered.
    """
    if failure is None or failure.kind is FailureKind.PERMANENT:
        return True
    if permit.request.needs_mark:
        return failure.kind is not FailureKind.AMBIGUOUS
    return permit.fresh and (unsent or failure.kind in WAITS_FOR_RESOURCE)


def _unsent(error: httpx.RequestError | None) -> bool:
    return isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))


def _may_renew(outcome: Outcome, state: CallState) -> bool:
    """Whether credentials of the account were refused, and the request can be sent once more."""
    refused = outcome.failure is not None and outcome.failure.kind is FailureKind.AUTH
    return refused and state.resendable and state.facts.trusted and outcome.permit.trusting


def _may_repeat(outcome: Outcome, state: CallState) -> bool:
    """Whether the fault may pass, and a repeat has no second effect or is in fact the first sending."""
    failure = outcome.failure
    if failure is None or failure.kind is not FailureKind.TRANSIENT or not state.resendable:
        return False
    return state.facts.repeatable or (_unsent(outcome.error) and not isinstance(outcome.error, httpx.PoolTimeout))


def _conclude(outcome: Outcome) -> Answer:
    if outcome.error is not None:
        raise outcome.error
    return cast("Answer", outcome.answer)


def fields(headers: httpx.Headers) -> Fields:
    """The headers of an answer, decoded once."""
    return Fields.of((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.raw)


# -- short repeats ----------------------------------------------------------------------------------------------------
#
# Tenacity's, bounded to a few tries in a few seconds, and only of what is safe to repeat. Whatever needs longer is the
# job's: it ends its execution and waits as a row, so nobody sleeps on a claim.

FIRST: Final = 0.2  # seconds; full jitter, doubling
LONGEST: Final = 1.0


class _Failed(Exception):
    """What tenacity is told of a failed try; never raised."""


class Repeats:
    """Decides between the tries of one call."""

    __slots__ = ("_retrying", "_settings", "_started", "_state")

    def __init__(self, settings: PoolSettings, started: float) -> None:
        """``started``: when the call began, by ``time.monotonic``."""
        self._settings, self._started = settings, started
        self._retrying: Retrying | None = None  # from the first failure on, which loads tenacity

    def _begin(self) -> Retrying:
        from tenacity import (  # noqa: PLC0415 - most calls never need it
            RetryCallState,
            Retrying,
            stop_after_attempt,
            stop_before_delay,
            wait_random_exponential,
        )

        stop = stop_after_attempt(self._settings.tries) | stop_before_delay(self._settings.tries_within)
        retrying = Retrying(stop=stop, wait=wait_random_exponential(multiplier=FIRST, max=LONGEST))
        retrying.begin()
        self._state = RetryCallState(retrying, None, (), {})
        self._state.start_time = self._started
        return retrying

    def next_delay(self, failure: Failure) -> float | None:
        """Seconds until the next try, or None if this was the last: never less than the provider asked for."""
        from tenacity import DoSleep, RetryError  # noqa: PLC0415 - as above

        self._retrying = self._retrying or self._begin()
        self._state.set_exception((_Failed, _Failed(), None))
        try:
            step = self._retrying.iter(self._state)
        except RetryError:
            return None
        if not isinstance(step, DoSleep):
            return None
        self._state.prepare_for_next_attempt()
        if failure.retry_in is not None and failure.retry_in > step:
            return None
        return float(step)


# -- the request that is sent -----------------------------------------------------------------------------------------
#
# It is the caller's, with credentials and key if its host may have them. The caller's request object is never changed,
# so httpx cannot copy our headers along a redirect, and no error or log that shows the request shows a token. A hop
# from the provider to a foreign host is sent bare; once a chain of redirects has left the provider's hosts, it gets no
# credentials even if it comes back.

# The headers of a redirected request that a foreign host may have.
BARE: Final = frozenset({
    b"host", b"accept", b"accept-encoding", b"accept-language", b"user-agent", b"connection", b"range",
    b"content-type", b"content-length", b"content-encoding", b"transfer-encoding",
    b"if-match", b"if-none-match", b"if-modified-since", b"if-unmodified-since", b"if-range",
})  # fmt: skip


class CallState:
    """The state of one call, kept in ``request.extensions``: the next hop of a redirect takes it from there."""

    __slots__ = (
        "_id", "bare", "facts", "failure", "has_outcome", "origin", "resendable", "sendings", "went_astray",
    )  # fmt: skip

    def __init__(
        self, facts: RequestFacts, origin: tuple[str, str, int | None], *, of: httpx.Request, resendable: bool
    ) -> None:
        self.facts, self.origin, self.resendable = facts, origin, resendable
        self._id = id(of)  # no reference, because the request refers to this state
        self.bare = False  # sent without the caller's headers, because a redirect led to a foreign host
        self.went_astray = False  # an earlier hop was at a foreign host: no credentials any more
        self.failure: Failure | None = None  # of the latest sending
        self.has_outcome = False  # of the latest sending
        self.sendings = 0  # of this call so far, with those of the hops before

    def is_of(self, request: httpx.Request) -> bool:
        """Whether this state was made for ``request`` itself; if not, ``request`` is the next hop of a redirect."""
        return self._id == id(request)


def plan(request_log: RequestLog, request: httpx.Request) -> CallState:
    """The `CallState` of ``request``, which is put into its extensions, too. Raises `InvalidInput`."""
    url, ext = request.url, request.extensions
    if not url.scheme and not request_log.base_url and request_log.provider.base_url:
        raise InvalidInput(f"{request.method} {url.path}: {request_log.without_address()}")
    if not url.scheme:
        raise httpx.UnsupportedProtocol(
            f"{request.method} {url.path}: {request_log.without_address()}", request=request
        )
    target = Target(str(url), url.scheme, host_of(url), url.port, url.path)
    origin = (target.scheme, target.host, target.port)
    last = ext.get(KEY)
    last = last if isinstance(last, CallState) else None  # of this request, or of the hop whose redirect led here
    hop = None if last is None or last.is_of(request) else last
    went_astray = last is not None and (last.went_astray or (hop is not None and not hop.facts.trusted))
    whole = isinstance(request.stream, httpx.ByteStream)
    facts = request_log.facts(
        request.method, target, request.headers, request.read() if whole else None, ext,
        hop=hop.facts if hop else None, trust=not went_astray,
    )  # fmt: skip
    state = CallState(facts, origin, of=request, resendable=whole)
    state.went_astray = went_astray
    state.sendings = hop.sendings if hop is not None else 0
    state.bare = last is not None and not facts.trusted and (last.bare or last.origin != origin)
    ext[KEY] = state
    if request_log.guards(target.host):
        ext[GUARDED] = True
    else:
        ext.pop(GUARDED, None)
    return state


def outgoing(
    request: httpx.Request, state: CallState, permit: Permit, request_log: RequestLog, span: Span | None = None
) -> httpx.Request:
    """The request as it is sent, within ``span``."""
    facts = state.facts
    url, added = request.url, dict[str, str]()
    if facts.trusted:
        added |= permit.headers
        if span is not None:
            added |= spans.propagated(span, request_log, request.headers)
        request_log.keep_secret(permit)
        if permit.params:
            url = url.copy_merge_params(permit.params)
    if facts.idempotency_key and (idem := request_log.provider.idempotency) is not None:
        headers, params = idem.fields(facts.idempotency_key)
        added |= headers
        if params:
            url = url.copy_merge_params(params)
    own = request_log.own_headers if facts.trusted else ()
    is_chunked = "transfer-encoding" in request.headers  # then a length beside it is forbidden (RFC 9112, 6.2)
    if not added and not own and not state.bare and url is request.url and not is_chunked:
        return request
    names = {name.lower().encode("ascii") for name in added} | ({b"content-length"} if is_chunked else set())
    kept = [
        pair for pair in request.headers.raw
        if (lower := pair[0].lower()) not in names and (not state.bare or lower in BARE)
    ]  # fmt: skip
    if own:
        _complete(kept, own, names)
    if wrong := [name for name, value in added.items() if not fits_header(value)]:
        raise httpx.LocalProtocolError(f"the value for header {wrong[0]} has a character that no header can hold")
    kept += [(name.encode("ascii"), value.encode("latin-1")) for name, value in added.items()]
    return httpx.Request(request.method, url, headers=kept, stream=request.stream, extensions=request.extensions)


def _complete(kept: list[tuple[bytes, bytes]], own: Sequence[tuple[bytes, bytes, bytes]], names: set[bytes]) -> None:
    """Add the headers that every request of the account carries; the caller's own ones win."""
    places = {pair[0].lower(): n for n, pair in enumerate(kept)}
    for lower, name, value in own:
        at = places.get(lower)
        if at is None and lower not in names:
            kept.append((name, value))
        elif (
            at is not None and lower == b"accept" and kept[at][1] == b"*/*"
        ):  # httpx's default, not the caller's choice
            kept[at] = (name, value)
