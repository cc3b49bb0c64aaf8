"""``job.client``: httpx's own clients, one per execution, over the worker's shared connections.

Building one costs about 30 microseconds (it loads no certificates and makes no pool), so it is built only for
executions that use it. A client keeps its own cookies: accounts never share them.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import httpx

from resilient.core.base.body import pick
from resilient.core.base.bounds import ERROR_CODE, ERROR_MESSAGE, SCRUBBED_TEXT
from resilient.core.base.budgets import Fields, budgets
from resilient.core.base.errors import Failure, FailureKind, InvalidInput, ResourceStopped
from resilient.core.base.exchange import AnswerFacts
from resilient.core.base.hosts import address, without_secrets
from resilient.core.base.numbers import json_text
from resilient.core.base.phrases import one_line, plain
from resilient.core.provider.classify import classify
from resilient.core.provider.facts import Part, PartAnswer
from resilient.wire.requests.answer import ASKED_FOR, KEY, Cookies, failed_answer
from resilient.wire.requests.flow import CallState, is_concluded
from resilient.wire.requests.redact import without_secrets_in_code
from resilient.wire.requests.request_log import Target
from resilient.wire.requests.transport import AsyncTransport, SyncTransport, drive, drive_sync

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.core.provider.facts import BatchEndpoint
    from resilient.wire.requests.flow import Flow
    from resilient.wire.requests.hooks import Permit
    from resilient.wire.requests.pool import Pool
    from resilient.wire.requests.request_log import RequestLog
    from resilient.wire.requests.transport import Bridge


_HEADERS: Final = {"accept-encoding": ASKED_FOR}
_IGNORED: Final = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""|"(?:[^"\\\n]|\\.)*"|#[^\n]*')
_OPERATION: Final = re.compile(r"\b(query|mutation|subscription|fragment)\b\s*([_A-Za-z]\w*)?|[{}]")


class _Redirected:
    """What both clients make of a redirect."""

    def _redirect_url(self, request: httpx.Request, response: httpx.Response) -> httpx.URL:
        """Where it leads. An address that is none is the server's fault; httpx tells some as if it were the caller's.

        It is made of every redirect, also of one that is not followed.
        """
        try:
            made: httpx.URL = super()._redirect_url(request, response)  # type: ignore[misc]
        except (httpx.InvalidURL, UnicodeError) as error:
            shown = one_line(without_secrets(response.headers["location"][: ERROR_MESSAGE.value]))
            raise httpx.RemoteProtocolError(
                f"the answer redirects to {shown!r}, which is no URL: {error}", request=request
            ) from None
        return made


class AsyncClient(_Redirected, httpx.AsyncClient):
    """An ``httpx.AsyncClient`` whose requests keep the job's gate, limits, keys and classification."""

    def __init__(self, request_log: RequestLog, pool: Pool, base_url: httpx.URL | str) -> None:
        super().__init__(
            transport=AsyncTransport(request_log, pool), base_url=base_url, timeout=pool.timeout, trust_env=False,
            headers=_HEADERS,
        )  # fmt: skip
        self._cookies = Cookies()
        self._request_log = request_log
        self.secret_params = request_log.provider.secret_params  # parameters of URLs that no row may keep

    async def graphql(
        self,
        query: str,
        variables: dict[str, Any] | None = None,
        *,
        operation: str | None = None,
        **options: Any,
    ) -> Any:
        """Send a GraphQL document to the provider's endpoint; returns ``data``.

        A document that only queries counts as idempotent. ``operation``: its name, where there are several.
        ``options`` go to ``post`` (``url=``, ``extensions=``, ``headers=``). Raises the classified failure
        for any error, also for one beside partial data.
        """
        response = await self.post(**_graphql_request(self._request_log, query, variables, operation, options))
        return _graphql_data(self._request_log, response)

    async def batch(self, parts: Sequence[Part]) -> list[PartAnswer]:
        """Send several requests in one, where the provider can (`Provider.batch`); their answers in the same order.

        A batch of n parts costs n, each by its own limits, and each answer is classified on its own: a part that is
        throttled, or that a gate keeps back, fails alone (`PartAnswer.raise_for_failure` makes only its job wait).
        More parts than fit go in several batches. Raises the classified failure of a batch that is refused as a whole,
        `ResourceStopped` if no part may go, and `InvalidInput`; the answers of batches before that one are lost then.
        """
        answers: list[PartAnswer] = []
        for envelope in envelopes(self._request_log, str(self.base_url), parts):
            await drive(envelope.admit())
            try:
                response = (await self.post(**envelope.options)).raise_for_status()
            except BaseException:
                envelope.abandon()
                raise
            answers += await drive(envelope.report(_json(response)))
        return answers


class Client(_Redirected, httpx.Client):
    """An ``httpx.Client`` whose requests keep the job's gate, limits, keys and classification."""

    def __init__(self, request_log: RequestLog, pool: Pool, base_url: httpx.URL | str, bridge: Bridge[Any]) -> None:
        super().__init__(
            transport=SyncTransport(request_log, pool, bridge), base_url=base_url, timeout=pool.timeout,
            trust_env=False, headers=_HEADERS,
        )  # fmt: skip
        self._cookies = Cookies()
        self._request_log, self._bridge = request_log, bridge
        self.secret_params = request_log.provider.secret_params

    def graphql(
        self,
        query: str,
        variables: dict[str, Any] | None = None,
        *,
        operation: str | None = None,
        **options: Any,
    ) -> Any:
        """See `AsyncClient.graphql`."""
        response = self.post(**_graphql_request(self._request_log, query, variables, operation, options))
        return _graphql_data(self._request_log, response)

    def batch(self, parts: Sequence[Part]) -> list[PartAnswer]:
        """See `AsyncClient.batch`."""
        answers: list[PartAnswer] = []
        for envelope in envelopes(self._request_log, str(self.base_url), parts):
            drive_sync(envelope.admit(), None, self._bridge)
            try:
                response = self.post(**envelope.options).raise_for_status()
            except BaseException:
                envelope.abandon()
                raise
            answers += drive_sync(envelope.report(_json(response)), None, self._bridge)
        return answers


def build_async_client(request_log: RequestLog, pool: Pool, base_url: str = "") -> AsyncClient:
    """The client of an ``async def`` handler. ``base_url``: another than the account's or the provider's."""
    return AsyncClient(request_log, pool, _parsed(base_url or request_log.base_url))


def build_client(request_log: RequestLog, pool: Pool, bridge: Bridge[Any], base_url: str = "") -> Client:
    """The client of a plain handler; ``bridge`` runs a coroutine on the engine's loop from its thread."""
    return Client(request_log, pool, _parsed(base_url or request_log.base_url), bridge)


_parsed: Final = lru_cache(maxsize=4096)(httpx.URL)


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


# -- GraphQL -------------------------------------------------------------------------------------------------


def _graphql_request(
    request_log: RequestLog,
    query: str,
    variables: dict[str, Any] | None,
    operation: str | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    document: dict[str, Any] = {"query": query}
    if variables is not None:
        document["variables"] = variables
    if operation is not None:
        document["operationName"] = operation
    words = {"idempotent": True} if only_queries(query, operation) else {}
    extensions = {**words, **options.pop("extensions", {})}
    return {"url": request_log.provider.graphql, "json": document, "extensions": extensions, **options}


def only_queries(document: str, operation: str | None = None) -> bool:
    """Whether executing a GraphQL document changes nothing: its (named) operation is a query."""
    depth = 0
    operations: list[tuple[str, str | None]] = []
    for match in _OPERATION.finditer(_IGNORED.sub(" ", document)):
        if match[0] in "{}":
            if match[0] == "{":
                if depth == 0 and not operations:
                    operations.append(("query", None))  # the short form: a document that begins with its selection
                depth += 1
            else:
                depth -= 1
        elif depth == 0:
            operations.append((match[1], match[2]))
    kinds = [kind for kind, name in operations if kind != "fragment" and operation in (None, name)]
    return bool(kinds) and all(kind == "query" for kind in kinds)


def _graphql_data(request_log: RequestLog, response: httpx.Response) -> Any:
    response.raise_for_status()
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if isinstance(answer, dict) and not answer.get("errors") and "data" in answer:
        return answer["data"]
    codes = [c for path in ("errors[].extensions.code", "errors[].type") for c in pick(answer, path)]
    failure = Failure(
        FailureKind.PERMANENT,
        code=one_line(str(codes[0])[: ERROR_CODE.value]) if codes else "graphql_error",
        status=response.status_code,
    )
    failure = without_secrets_in_code(failure, request_log.secrets) or failure
    response.extensions[KEY] = failure
    state = response.request.extensions.get(KEY)
    if isinstance(state, CallState):
        state.failure = failure
        request_log.note(state.facts, failure)
    messages = [m for m in pick(answer, "errors[].message") if isinstance(m, str)]
    message = plain(messages[0][: SCRUBBED_TEXT.value]) if messages else "no GraphQL answer"
    raise failed_answer(response, failure, message, request_log.secrets)


# -- batches ----------------------------------------------------------------------------------------------------------
#
# A batch sends several requests in one. Each part is admitted, drawn, classified and reported to the engine as a
# request of its own, with its own key; the envelope itself draws nothing, and may be repeated if every part may. Its
# mark stands for the parts without a key; a part whose key is forgotten some day has its own. A part that is throttled
# by its answer closes no gate: its neighbours were served, so the answer speaks of that part only. Credentials that are
# refused, an outage and a throttle of the whole batch are the envelope's answer, and have their usual effects.

_OWN: Final = frozenset({FailureKind.THROTTLED, FailureKind.QUOTA, FailureKind.AUTH})  # of the part alone


class Envelope:
    """Parts that go into one request. ``options``: what the client's ``post`` takes."""

    def __init__(self, request_log: RequestLog, base_url: str, parts: Sequence[Part]) -> None:
        self._request_log, self._parts = request_log, parts
        self._base = base_url.rstrip("/")
        self._facts = endpoint(request_log)
        self._stopped: dict[int, ResourceStopped] = {}
        self._permits: dict[int, Permit] = {}

    def admit(self) -> Flow:
        """Draw for each part. Raises `ResourceStopped` if none may go."""
        try:
            for number, part in enumerate(self._parts):
                target = f"{self._base}/{part.url.lstrip('/')}"
                split = address(target)
                body = None if part.body is None else _body_of(part, number)
                request = self._request_log.facts(
                    part.method.upper(), Target(target, *split), httpx.Headers(part.headers), body, {}
                )
                try:
                    self._permits[number] = permit = yield self._request_log.hooks.admit(request)
                except ResourceStopped as stopped:
                    self._stopped[number] = stopped
                    self._request_log.give_up(request)
                    continue
                except BaseException:
                    self._request_log.give_up(request)
                    raise
                if request.is_forgettable:
                    yield self._request_log.hooks.mark(permit)
        except BaseException:
            self.abandon()
            raise
        if self._stopped and not self._permits:
            raise next(iter(self._stopped.values()))

    def abandon(self) -> None:
        """Give the permits back: the envelope was not answered."""
        for permit in self._permits.values():
            self._request_log.give_up(permit.request)
            self._request_log.hooks.abandoned(permit)

    @property
    def options(self) -> dict[str, Any]:
        """What the client's ``post`` takes."""
        written = [self._written(number, permit.request.idempotency_key) for number, permit in self._permits.items()]
        safe = all(permit.request.repeatable for permit in self._permits.values())
        extensions = {"cost": 0.0, **({"idempotent": True} if safe else {})}
        return {"url": self._facts.path, "json": {self._facts.requests: written}, "extensions": extensions}

    def _written(self, number: int, key: str | None) -> dict[str, Any]:
        """A part as the provider takes it, with its key."""
        part, idempotency = self._parts[number], self._request_log.provider.idempotency
        url, headers = part.url, dict(part.headers)
        if key is not None and idempotency is not None:
            added, params = idempotency.fields(key)
            names = {name.lower() for name in added}
            headers = {**{name: value for name, value in headers.items() if name.lower() not in names}, **added}
            url = str(httpx.URL(url).copy_merge_params(params)) if params else url
        one: dict[str, Any] = {"id": str(number), "method": part.method.upper(), "url": url}
        if part.body is not None:
            headers = {"Content-Type": "application/json", **headers}
            one["body"] = part.body
        return {**one, "headers": headers} if headers else one

    def report(self, answer: Any) -> Flow:
        """The parts' answers, in the order of the parts; each is reported to the engine."""
        items = answer.get(self._facts.responses) if isinstance(answer, dict) else None
        items = items if isinstance(items, list) else ()
        every = {str(one.get("id")): one for one in items if isinstance(one, dict)}
        answers = []
        try:
            for number, part in enumerate(self._parts):
                if number in self._stopped:
                    stopped = self._stopped[number]
                    failure = Failure(FailureKind.THROTTLED, retry_at=stopped.until, code=f"stopped_{stopped.gate}")
                    answers.append(PartAnswer(part, None, failure=failure))
                    continue
                answers.append((yield from self._one(part, self._permits.pop(number), every.get(str(number)))))
        except BaseException:  # reporting failed (the database is away, say): the others' permits are open still
            self.abandon()
            raise
        return answers

    def _one(self, part: Part, permit: Permit, answer: dict[str, Any] | None) -> Flow:
        hooks, provider = self._request_log.hooks, self._request_log.provider
        if answer is None or type(answer.get("status")) is not int:
            hooks.abandoned(permit)
            lost = Failure(FailureKind.TRANSIENT if permit.request.repeatable else FailureKind.AMBIGUOUS)
            self._note(permit, lost)
            return PartAnswer(part, None, failure=lost)
        now, body = hooks.now(), answer.get("body")
        headers = answer.get("headers")
        fields = Fields.of({str(k): str(v) for k, v in (headers if isinstance(headers, dict) else {}).items()})
        server_budgets = budgets(fields, now, fields=provider.waits.budgets)
        text = body if isinstance(body, str) else json.dumps(body)
        facts = AnswerFacts(
            answer["status"], fields, body=None if isinstance(body, str) else body, text=text, budgets=server_budgets
        )
        failure = without_secrets_in_code(classify(facts, permit.request, provider, now), self._request_log.secrets)
        self._note(permit, failure)
        yield hooks.answered(permit, facts, None if failure is not None and failure.kind in _OWN else failure)
        return PartAnswer(part, facts.status, fields, body, failure)

    def _note(self, permit: Permit, failure: Failure | None) -> None:
        """Take in the outcome of a part; without a conclusion the next part like it has its name, and so its key."""
        self._request_log.settle(permit.request, failure)
        if permit.request.is_forgettable and is_concluded(permit, failure, unsent=False):
            self._request_log.hooks.clear(permit, took_effect=failure is None)


def _body_of(part: Part, number: int) -> bytes:
    """A part's body as JSON. Raises `InvalidInput`."""
    try:
        return json_text(part.body).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the body of part {number} ({part.method} {part.url}) is not JSON: {error}") from None


def endpoint(request_log: RequestLog) -> BatchEndpoint:
    """The provider's batch endpoint. Raises `InvalidInput`."""
    facts = request_log.provider.batch
    if facts is None:
        raise InvalidInput(f"provider {request_log.provider.name!r} declares no batch endpoint: Provider(batch=...)")
    return facts


def envelopes(request_log: RequestLog, base_url: str, parts: Sequence[Part]) -> list[Envelope]:
    """As many as the provider's largest batch needs. Raises `InvalidInput`."""
    most = endpoint(request_log).most
    return [Envelope(request_log, base_url, parts[at : at + most]) for at in range(0, len(parts), most)]
