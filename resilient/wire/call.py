"""``job.call``: one request made by somebody else's client, admitted and reported as one of ours.

    async with job.call("POST", url) as call:
        answer = vendor_sdk.post(url, headers=call.headers)
        call.report(answer.status, answer.headers, answer.text)

Entering admits the request or raises, before any I/O; leaving tells the engine what was reported, or the
exception that ended the block. `report` returns the classified failure and `raise_for_failure` raises it: the
block itself raises nothing of its own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlencode

from resilient.core.bounds import ERROR_BODY, ERROR_MESSAGE
from resilient.core.budgets import Fields, budgets
from resilient.core.classify import Phase, classify, classify_error, cost_of, message_of
from resilient.core.errors import InvalidInput, JobFailure
from resilient.core.exchange import AnswerFacts
from resilient.core.failure import Failure, FailureKind, at_scope
from resilient.core.hosts import PORTS, address, without_secrets
from resilient.core.plain_text import one_line
from resilient.wire import redact
from resilient.wire.explain import chain, known_phase, note
from resilient.wire.flow import concluded
from resilient.wire.guard import resolved
from resilient.wire.trail import Target
from resilient.wire.transport import drive, drive_sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from resilient.wire.conduct import Permit
    from resilient.wire.flow import Flow
    from resilient.wire.trail import Trail
    from resilient.wire.transport import Bridge


class Call:
    """What the block sees.

    ``words`` are those of `Trail.facts`. ``headers``: credentials and key to send; ``params``: those that belong into
    the URL, ``url`` has them already; ``failure``: what `report` found; ``renewed``: after the block, whether there are
    newer credentials after refused ones, so that the request is worth a repeat, in a new call.
    """

    def __init__(
        self,
        trail: Trail,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        trusted: bool = True,
        **words: Any,
    ) -> None:
        if trail.base_url and "://" not in url:
            url = f"{trail.base_url.rstrip('/')}/{url.lstrip('/')}"
        if "://" not in url:
            raise InvalidInput(
                f"call: {one_line(without_secrets(url))!r} is no absolute URL, such as 'https://api.example.com/v1';"
                f" {trail.without_address()}"
            )
        parts = address(url)
        target = Target(url, parts.scheme, parts.host, parts.port, parts.path)
        self._trail = trail
        said = {k: v for k, v in words.items() if v is not None}
        self._asked = trail.facts(method.upper(), target, headers or {}, body, said, trust=trusted)
        self._permit: Permit | None = None
        self._answer: AnswerFacts | None = None
        self.headers: dict[str, str] = {}
        self.params: dict[str, str] = {}  # where the provider takes credentials or key in the URL
        self._url = url
        self.failure: Failure | None = None
        self.renewed = False

    @property
    def trusted(self) -> bool:
        """Whether it goes to a host of the provider's, and may carry credentials."""
        return self._asked.trusted

    @property
    def reads_success(self) -> bool:
        """Whether `report` needs the body of a success too, because the provider's errors may come as 200."""
        return self._asked.gated and self._trail.provider.errors.reads_success

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
        provider, now = self._trail.provider, self._trail.conduct.now()
        fields = Fields.of(headers)
        text, parsed = _body(body)
        left = budgets(fields, now, fields=provider.waits.budgets)
        self._answer = AnswerFacts(status, fields, body=parsed, text=text, budgets=left)
        if provider.cost is not None and self._asked.gated:
            self._answer = replace(self._answer, cost=cost_of(self._answer, provider))
        self.failure = redact.without_secrets_in_code(
            classify(self._answer, self._asked, provider, now), self._trail.secrets
        )
        return self.failure

    def raise_for_failure(self) -> None:
        """Raise the classified failure, if `report` found one."""
        if self.failure is not None and self._answer is not None:
            raise self._error(self.failure, self._answer)

    def _error(self, failure: Failure, answer: AnswerFacts) -> JobFailure:
        """Made apart from where it is raised: what its frame knows, error trackers collect."""
        asked, said = self._asked, message_of(answer, self._trail.provider)
        words = [f"{asked.method} {without_secrets(asked.url)} answered {answer.status}"]
        if said:
            words.append(redact.scrub(said, self._trail.secrets, ERROR_MESSAGE.value))
        error = JobFailure(": ".join([words[0], failure.kind, *words[1:]]), failure=failure)
        error.told = ": ".join(words)
        error.resource = at_scope(asked.key, failure.scope) if asked.gated else None
        return error

    # -- around the block ------------------------------------------------------------------------------------

    def _enter(self) -> Flow:
        asked, conduct = self._asked, self._trail.conduct
        parts = address(self._url)
        if self._trail.guards(parts.host):  # that client resolves it again: this is less than `job.client`
            yield resolved(parts.host, parts.port or PORTS[parts.scheme])
        self._permit = yield conduct.admit(asked)
        if asked.marked:
            try:
                yield conduct.mark(self._permit)
            except BaseException:
                self._trail.give_up(asked)
                conduct.abandoned(self._permit)
                raise
        if asked.trusted:
            self.headers.update(self._trail.headers)
            self.headers.update(self._permit.headers)
            self.params.update(self._permit.params)
            self._trail.keep_secret(self._permit)
        if asked.idempotency_key and (idem := self._trail.provider.idempotency) is not None:
            if idem.query:
                self.params[idem.query] = asked.idempotency_key
            else:
                self.headers[idem.header] = f'"{asked.idempotency_key}"' if idem.quoted else asked.idempotency_key

    def _exit(self, error: BaseException | None) -> Flow:
        asked, conduct, permit = self._asked, self._trail.conduct, self._permit
        assert permit is not None  # noqa: S101 - entered before left
        if self._answer is None:
            caught = error if isinstance(error, Exception) else None
            self.failure = _without_answer(caught, repeatable=asked.repeatable)
            if caught is not None and self.failure is not None and not isinstance(caught, JobFailure):
                note(caught, self.failure, asked)
        if self._answer is None and self.failure is None:  # cancelled, or the user's own error: a mark stands
            self._trail.give_up(asked)
            conduct.abandoned(permit)
            if error is None:
                raise InvalidInput(
                    f"call {asked.method} {without_secrets(asked.url)}: the block ended without"
                    " call.report(status, headers, body), so its outcome is unknown"
                )
            return
        self._trail.note(asked, self.failure)
        try:
            yield from self._tell(permit)
        finally:  # the engine's database may be away: what is known about the request is known
            if asked.marked and concluded(permit, self.failure, unsent=self._answer is None and _never_sent(error)):
                conduct.clear(permit, took_effect=self.failure is None)

    def _tell(self, permit: Permit) -> Flow:
        """Report to the engine, after a try to get newer credentials for refused ones."""
        asked, conduct, failure = self._asked, self._trail.conduct, self.failure
        if failure is not None and failure.kind is FailureKind.AUTH and permit.trusting:
            fresh = yield conduct.refreshed(permit, failure)
            self.renewed = fresh
            failure = None if fresh else failure
        if asked.gated and self._answer is not None:
            yield conduct.answered(permit, self._answer, failure)
        elif asked.gated and failure is not None:
            yield conduct.failed(permit, failure)


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

    def __init__(self, trail: Trail, bridge: Bridge[Any], method: str, url: str, **words: Any) -> None:
        super().__init__(trail, method, url, **words)
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
    try:
        return body[: ERROR_BODY.value], json.loads(body) if body.lstrip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        return body[: ERROR_BODY.value], None


def _never_sent(error: BaseException | None) -> bool:
    """Whether the client's error says that nothing left this machine."""
    found = [known_phase(one) for one in (() if error is None else chain(error))]
    return any(one is not None and one[0] in (Phase.CONNECT, Phase.POOL) for one in found)


def _without_answer(error: BaseException | None, *, repeatable: bool) -> Failure | None:
    """The block was ended by an exception before anything was reported; None if it is no client's error."""
    for one in () if error is None else chain(error):
        if isinstance(one, JobFailure):
            return one.failure
        if (found := known_phase(one)) is not None:
            return classify_error(found[0], repeatable=repeatable, code=found[1])
        if isinstance(one, OSError):  # a socket's, or a TimeoutError
            return classify_error(Phase.READ, repeatable=repeatable, code="no_answer")
    return None
