"""``job.client``: httpx's own clients, one per execution, over the worker's shared connections.

Building one costs about 30 microseconds (no certificates are loaded, no pool is made), so an execution that
asks for none should get none. A client keeps its own cookies: accounts never share them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import httpx

from resilient.core.body import pick
from resilient.core.bounds import ERROR_CODE, SCRUBBED_TEXT
from resilient.core.failure import Failure, FailureKind
from resilient.core.plain_text import one_line, plain
from resilient.wire.answer import KEY
from resilient.wire.decoding import ASKED_FOR
from resilient.wire.failures import failed_answer
from resilient.wire.outgoing import Passage
from resilient.wire.parts import envelopes
from resilient.wire.redact import without_secrets_in_code
from resilient.wire.transport import AsyncTransport, SyncTransport, drive, drive_sync

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.core.parts import Part, PartAnswer
    from resilient.wire.pool import Pool
    from resilient.wire.trail import Trail
    from resilient.wire.transport import Bridge

_HEADERS: Final = {"accept-encoding": ASKED_FOR}
_IGNORED: Final = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""|"(?:[^"\\\n]|\\.)*"|#[^\n]*')
_OPERATION: Final = re.compile(r"\b(query|mutation|subscription|fragment)\b\s*([_A-Za-z]\w*)?|[{}]")


class AsyncClient(httpx.AsyncClient):
    """An ``httpx.AsyncClient`` whose requests keep the job's gate, limits, keys and classification."""

    def __init__(self, trail: Trail, pool: Pool, base_url: httpx.URL | str) -> None:
        super().__init__(
            transport=AsyncTransport(trail, pool), base_url=base_url, timeout=pool.timeout, trust_env=False,
            headers=_HEADERS,
        )  # fmt: skip
        self._trail = trail
        self.secret_params = trail.provider.secret_params  # of URLs, which no row may keep

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
        response = await self.post(**_graphql_request(self._trail, query, variables, operation, options))
        return _graphql_data(self._trail, response)

    async def batch(self, parts: Sequence[Part]) -> list[PartAnswer]:
        """Send several requests in one, where the provider can (`Provider.batch`); their answers in the same order.

        A batch of n parts costs n, each by its own limits, and each answer is classified on its own: a part that is
        throttled, or that a gate keeps back, fails alone (`PartAnswer.raise_for_failure` makes only its job wait).
        More parts than fit go in several batches. Raises the classified failure of a batch that is refused as a whole,
        `ResourceStopped` if no part may go, and `InvalidInput`.
        """
        found: list[PartAnswer] = []
        for envelope in envelopes(self._trail, str(self.base_url), parts):
            await drive(envelope.admit())
            try:
                response = (await self.post(**envelope.options)).raise_for_status()
            except BaseException:
                envelope.abandon()
                raise
            found += await drive(envelope.tell(_json(response)))
        return found


class Client(httpx.Client):
    """An ``httpx.Client`` whose requests keep the job's gate, limits, keys and classification."""

    def __init__(self, trail: Trail, pool: Pool, base_url: httpx.URL | str, bridge: Bridge[Any]) -> None:
        super().__init__(
            transport=SyncTransport(trail, pool, bridge), base_url=base_url, timeout=pool.timeout,
            trust_env=False, headers=_HEADERS,
        )  # fmt: skip
        self._trail, self._bridge = trail, bridge
        self.secret_params = trail.provider.secret_params

    def graphql(
        self,
        query: str,
        variables: dict[str, Any] | None = None,
        *,
        operation: str | None = None,
        **options: Any,
    ) -> Any:
        """See `AsyncClient.graphql`."""
        response = self.post(**_graphql_request(self._trail, query, variables, operation, options))
        return _graphql_data(self._trail, response)

    def batch(self, parts: Sequence[Part]) -> list[PartAnswer]:
        """See `AsyncClient.batch`."""
        found: list[PartAnswer] = []
        for envelope in envelopes(self._trail, str(self.base_url), parts):
            drive_sync(envelope.admit(), None, self._bridge)
            try:
                response = self.post(**envelope.options).raise_for_status()
            except BaseException:
                envelope.abandon()
                raise
            found += drive_sync(envelope.tell(_json(response)), None, self._bridge)
        return found


def build_async_client(trail: Trail, pool: Pool, base_url: str = "") -> AsyncClient:
    """The client of an ``async def`` handler. ``base_url``: another than the account's or the provider's."""
    return AsyncClient(trail, pool, _parsed(base_url or trail.base_url))


def build_client(trail: Trail, pool: Pool, bridge: Bridge[Any], base_url: str = "") -> Client:
    """The client of a plain handler; ``bridge`` runs a coroutine on the engine's loop from its thread."""
    return Client(trail, pool, _parsed(base_url or trail.base_url), bridge)


_parsed: Final = lru_cache(maxsize=4096)(httpx.URL)


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


# -- GraphQL -------------------------------------------------------------------------------------------------


def _graphql_request(
    trail: Trail, query: str, variables: dict[str, Any] | None, operation: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    document: dict[str, Any] = {"query": query}
    if variables is not None:
        document["variables"] = variables
    if operation is not None:
        document["operationName"] = operation
    words = {"idempotent": True} if only_queries(query, operation) else {}
    extensions = {**words, **options.pop("extensions", {})}
    return {"url": trail.provider.graphql, "json": document, "extensions": extensions, **options}


def only_queries(document: str, operation: str | None = None) -> bool:
    """Whether executing a GraphQL document changes nothing: its (named) operation is a query."""
    depth = 0
    found: list[tuple[str, str | None]] = []
    for match in _OPERATION.finditer(_IGNORED.sub(" ", document)):
        if match[0] in "{}":
            if match[0] == "{":
                if depth == 0 and not found:
                    found.append(("query", None))  # the short form: a document that begins with its selection
                depth += 1
            else:
                depth -= 1
        elif depth == 0:
            found.append((match[1], match[2]))
    kinds = [kind for kind, name in found if kind != "fragment" and operation in (None, name)]
    return bool(kinds) and all(kind == "query" for kind in kinds)


def _graphql_data(trail: Trail, response: httpx.Response) -> Any:
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
    failure = without_secrets_in_code(failure, trail.secrets) or failure
    response.extensions[KEY] = failure
    passage = response.request.extensions.get(KEY)
    if isinstance(passage, Passage):
        passage.failure = failure
        trail.note(passage.asked, failure)
    said = [m for m in pick(answer, "errors[].message") if isinstance(m, str)]
    raise failed_answer(
        response, failure, plain(said[0][: SCRUBBED_TEXT.value]) if said else "no GraphQL answer", trail.secrets
    )
