"""``job.call``: one request made by somebody else's client, admitted and reported as one of ours.

    async with job.call("POST", url) as call:
        answer = vendor_sdk.post(url, headers=call.headers)
        call.report(answer.status, answer.headers, answer.text)

Entering admits the request or raises, before any I/O; leaving passes on to the engine what was reported, or
the exception that ended the block. `report` returns the classified failure and `raise_for_failure` raises it: the
block itself raises nothing of its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlencode

from resilient.core.base.bounds import ANSWER_BODIES, ERROR_BODY, ERROR_MESSAGE
from resilient.core.base.budgets import Fields, budgets
from resilient.core.base.errors import (
    Failure,
    FailureKind,
    InvalidInput,
    JobFailure,
    ResourceStopped,
    at_scope,
    chain,
)
from resilient.core.base.exchange import AnswerFacts
from resilient.core.base.hosts import PORTS, address, without_secrets
from resilient.core.base.phrases import one_line
from resilient.core.provider.classify import Phase, classify, classify_error, cost_of, message_of
from resilient.wire.requests import redact
from resilient.wire.requests import span as spans
from resilient.wire.requests.body_budget import Reservation
from resilient.wire.requests.explain import note, phase_of
from resilient.wire.requests.flow import is_concluded, require_connection
from resilient.wire.requests.guard import resolved
from resilient.wire.requests.request_log import Target
from resilient.wire.requests.transport import drive, drive_sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from resilient.core.base.exchange import RequestFacts
    from resilient.core.base.tracing import Span
    from resilient.wire.requests.flow import Flow
    from resilient.wire.requests.hooks import Permit
    from resilient.wire.requests.request_log import RequestLog
    from resilient.wire.requests.transport import Bridge


_ABSOLUTE: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]{0,30}://")


class Call:
    """What the block sees.

    ``words`` are those of `RequestLog.facts`. ``headers``: credentials and key to send; ``params``: those that belong
    into the URL, and ``url`` has them already; ``failure``: the classification of what was reported; ``renewed``: after
    the block, whether refused credentials were replaced by newer ones, so that the request is worth a repeat, in a new
    call.
    """

    def __init__(
        self,
        request_log: RequestLog,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        trusted: bool = True,
        **words: Any,
    ) -> None:
        self._request_log, self._url = request_log, url
        options = {k: v for k, v in words.items() if v is not None}
        self._words = method.upper(), headers or {}, body, options, trusted
        if not request_log.is_unconnected:
            self._request = self._facts()
        self._permit: Permit | None = None
        self._answer: AnswerFacts | None = None
        self._span: Span | None = None
        self.headers: dict[str, str] = {}
        self.params: dict[str, str] = {}  # where the provider takes credentials or key in the URL
        self.failure: Failure | None = None
        self.renewed = False

    def _facts(self) -> RequestFacts:
        """The facts of its request. Raises `InvalidInput`."""
        log, url, (method, headers, body, options, trust) = self._request_log, self._url, self._words
        is_absolute = _ABSOLUTE.match(url) is not None
        if log.base_url and not is_absolute:
            self._url = url = f"{log.base_url.rstrip('/')}/{url.lstrip('/')}"
        elif not is_absolute:
            raise InvalidInput(
                f"call: {one_line(without_secrets(url))!r} is no absolute URL, such as 'https://api.example.com/v1';"
                f" {log.without_address()}"
            )
        parts = address(url)
        target = Target(url, parts.scheme, parts.host, parts.port, parts.path)
        return log.facts(method, target, headers, body, options, trust=trust)

    @property
    def trusted(self) -> bool:
        """Whether it goes to a host of the provider's, and may carry credentials."""
        return self._request.trusted

    @property
    def reads_success(self) -> bool:
        """Whether `report` needs the body of a success too, because the provider's errors may come as 200."""
        return self._request.gated and self._request_log.provider.errors.reads_success

    @property
    def repeatable(self) -> bool:
        """Whether it may be sent again without a second effect."""
        return self._request.repeatable

    def make_reservation(self) -> Reservation:
        """Room for the body of its answer."""
        return Reservation(self._request_log.account, ANSWER_BODIES.value)

    @property
    def url(self) -> str:
        """The URL to ask, with `params`."""
        if not self.params:
            return self._url
        head, mark, fragment = self._url.partition("#")
        return f"{head}{'&' if '?' in head else '?'}{urlencode(self.params)}{mark}{fragment}"

    def report(
        self, status: int, headers: Mapping[str, str] | Iterable[tuple[str, str]] = (), body: Any = None
    ) -> Failure | None:
        """Say what came back. ``body``: bytes, text, or decoded JSON."""
        provider, now = self._request_log.provider, self._request_log.hooks.now()
        fields = Fields.of(headers)
        text, parsed = _body(body)
        server_budgets = budgets(fields, now, fields=provider.waits.budgets)
        self._answer = AnswerFacts(status, fields, body=parsed, text=text, budgets=server_budgets)
        if provider.cost is not None and self._request.gated:
            self._answer = replace(self._answer, cost=cost_of(self._answer, provider))
        self.failure = redact.without_secrets_in_code(
            classify(self._answer, self._request, provider, now), self._request_log.secrets
        )
        return self.failure

    def cut_off(self, error: BaseException, *, by_us: bool = False) -> None:
        """Say that the body of the reported answer could not be read, for want of room (``by_us``) or by ``error``.

        So its outcome is open again.
        """
        if self._permit is not None and (self._request.gated or self._request.name):
            self._request_log.cut_off(self._permit, by_us=by_us)
        failure = None if isinstance(error, JobFailure) else _without_answer(error, repeatable=self.repeatable)
        if failure is not None:
            note(error, failure, self._request)

    def raise_for_failure(self) -> None:
        """Raise the classified failure, if `report` found one."""
        if self.failure is not None and self._answer is not None:
            raise self._error(self.failure, self._answer)

    def _error(self, failure: Failure, answer: AnswerFacts) -> JobFailure:
        """Made in a function of its own: error trackers collect the variables of the frame that raises."""
        request, message = self._request, message_of(answer, self._request_log.provider)
        words = [f"{request.method} {without_secrets(request.url)} answered {answer.status}"]
        if message:
            words.append(redact.scrub(message, self._request_log.secrets, ERROR_MESSAGE.value))
        error = JobFailure(": ".join([words[0], failure.kind, *words[1:]]), failure=failure)
        error.bare_message = ": ".join(words)
        error.resource = at_scope(request.key, failure.scope) if request.gated else None
        return error

    # -- around the block ------------------------------------------------------------------------------------

    def _enter(self) -> Flow:
        if self._request_log.is_unconnected:
            origin = address(self._url)[:3] if _ABSOLUTE.match(self._url) else ()
            yield from require_connection(self._request_log, *origin)
            self._request = self._facts()
        request, hooks = self._request, self._request_log.hooks
        parts = address(self._url)
        if self._request_log.guards(parts.host):  # the caller's client resolves it again, so `job.client` is safer
            yield resolved(parts.host, parts.port or PORTS[parts.scheme])
        try:
            self._permit = yield hooks.admit(request)
            yield from self._mark(self._permit)
        except BaseException:
            self._request_log.give_up(request)
            if self._permit is not None:
                hooks.abandoned(self._permit)
            raise
        self._span = spans.begin(self._request_log, request)
        if request.trusted:
            self.headers.update(self._request_log.headers)
            self.headers.update(self._permit.headers)
            self.headers.update(spans.propagated(self._span, self._request_log, request.headers))
            self.params.update(self._permit.params)
            self._request_log.keep_secret(self._permit)
        if request.idempotency_key and (idem := self._request_log.provider.idempotency) is not None:
            headers, params = idem.fields(request.idempotency_key)
            self.headers.update(headers)
            self.params.update(params)

    def _mark(self, permit: Permit) -> Flow:
        """Mark it, and take the last look: the caller's client sends it now."""
        request, hooks = self._request, self._request_log.hooks
        if request.marked:
            yield hooks.mark(permit)
        if not hooks.is_late(permit):
            return
        try:
            yield hooks.again(permit)
        except ResourceStopped:
            if request.marked and permit.fresh:
                hooks.clear(permit, took_effect=False)
            raise

    def _exit(self, error: BaseException | None) -> Flow:
        request, hooks, permit = self._request, self._request_log.hooks, self._permit
        assert permit is not None  # noqa: S101 - entered before left
        if self._answer is None:
            caught = error if isinstance(error, Exception) else None
            self.failure = _without_answer(caught, repeatable=request.repeatable)
            if caught is not None and self.failure is not None and not isinstance(caught, JobFailure):
                note(caught, self.failure, request)
        if self._span is not None:
            status = None if self._answer is None else self._answer.status
            spans.end(self._span, status=status, failure=self.failure, error=error if status is None else None)
        if self._answer is None and self.failure is None:  # cancelled, or the user's own error: a mark stands
            self._request_log.give_up(request)
            hooks.abandoned(permit)
            if error is None:
                raise InvalidInput(
                    f"call {request.method} {without_secrets(request.url)}: the block ended without"
                    " call.report(status, headers, body), so its outcome is unknown"
                )
            return
        self._request_log.note(request, self.failure)
        self._request_log.settle(request, self.failure)
        try:
            yield from self._report(permit)
        finally:  # also if the database is away: the outcome of the request is certain
            if request.marked and is_concluded(
                permit, self.failure, unsent=self._answer is None and _never_sent(error)
            ):
                hooks.clear(permit, took_effect=self.failure is None)

    def _report(self, permit: Permit) -> Flow:
        """Report to the engine, after a try to get newer credentials for refused ones."""
        request, hooks, failure = self._request, self._request_log.hooks, self.failure
        if failure is not None and failure.kind is FailureKind.AUTH and permit.trusting:
            try:
                fresh = yield hooks.refreshed(permit, failure)
            except BaseException:
                hooks.abandoned(permit)
                raise
            self.renewed = fresh
            failure = None if fresh else failure
        if request.gated and self._answer is not None:
            yield hooks.answered(permit, self._answer, failure)
        elif request.gated and failure is not None:
            yield hooks.failed(permit, failure)


class AsyncCall(Call):
    """``async with job.call(...)``."""

    async def __aenter__(self) -> Self:
        await drive(self._enter())
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await drive(self._exit(error))


class SyncCall(Call):
    """``with job.call(...)``, in a thread."""

    def __init__(self, request_log: RequestLog, bridge: Bridge[Any], method: str, url: str, **words: Any) -> None:
        super().__init__(request_log, method, url, **words)
        self._bridge = bridge

    def __enter__(self) -> Self:
        drive_sync(self._enter(), None, self._bridge)
        return self

    def __exit__(
        self, _type: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        drive_sync(self._exit(error), None, self._bridge)


def _body(body: Any) -> tuple[str, Any]:
    """A reported body as text and as JSON."""
    if isinstance(body, (dict, list)):
        return "", body
    if isinstance(body, (bytes, bytearray)):
        body = bytes(body).decode("utf-8", "replace")
    if not isinstance(body, str):
        return "", None
    body = body.removeprefix("\ufeff")  # RFC 8259, 8.1
    try:
        return body[: ERROR_BODY.value], json.loads(body) if body.lstrip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        return body[: ERROR_BODY.value], None


def _never_sent(error: BaseException | None) -> bool:
    """Whether the client's error says that nothing left this machine."""
    phases = [phase_of(one) for one in (() if error is None else chain(error))]
    return any(one is not None and one[0] in (Phase.CONNECT, Phase.POOL) for one in phases)


def _without_answer(error: BaseException | None, *, repeatable: bool) -> Failure | None:
    """The failure of a block that an exception ended before any report; None if that is no client's error."""
    for one in () if error is None else chain(error):
        if isinstance(one, JobFailure):
            return one.failure
        if (phase := phase_of(one)) is not None:
            return classify_error(phase[0], repeatable=repeatable, code=phase[1])
        if isinstance(one, OSError):  # a socket's, or a TimeoutError
            return classify_error(Phase.READ, repeatable=repeatable, code="no_answer")
    return None
