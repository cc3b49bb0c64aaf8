"""How a handler sends requests: through its job's resource, or through another one (`Through`).

The two classes at the top are what `Job`, `SyncJob` and the objects of ``job.through(...)`` share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

    from resilient.wire.call import AsyncCall, SyncCall
    from resilient.wire.client import AsyncClient, Client


class Sender(Protocol):
    """What stands behind one resource's requests."""

    def async_client(self) -> Any:
        """A client for coroutines."""

    def sync_client(self) -> Any:
        """A client for threads."""

    def async_call(self, method: str, url: str, words: Mapping[str, Any]) -> Any:
        """Admit one foreign request."""

    def sync_call(self, method: str, url: str, words: Mapping[str, Any]) -> Any:
        """The same for threads."""


class Requests:
    """Requests from coroutines."""

    __slots__ = ()
    _side: Any

    @property
    def client(self) -> AsyncClient:
        """An ``httpx.AsyncClient`` that keeps the resource's limits, gate, keys and classification."""
        client: AsyncClient = self._side.async_client()
        return client

    @property
    def transport(self) -> httpx.AsyncBaseTransport:
        """The client's transport, for an SDK that builds its own: ``httpx.AsyncClient(transport=job.transport)``.

        Closing such a client closes nothing.
        """
        return self.client._transport  # noqa: SLF001 - httpx has no name for it

    def call(
        self,
        method: str,
        url: str,
        *,
        cost: float | None = None,
        op: str | None = None,
        idempotent: bool | None = None,
        idempotency_key: str | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        trusted: bool = True,
    ) -> AsyncCall:
        """Admit one request that somebody else's client makes: ``async with job.call("POST", url) as call:``.

        Entering admits or raises, before any I/O; send ``call.headers`` (to ``call.url``, if the provider takes its key
        in the URL), then say ``call.report(status, headers, body)``. ``cost`` is in units of the limits. ``op`` names
        the request (its key and mark), ``idempotent`` says that repeating it is harmless. ``headers``: what the client
        would send by itself, so that an idempotency key of the caller's is used, and one an SDK made up is not.
        ``trusted=False``: no credentials, wherever it goes. `resilient.adapters` do all this for requests and aiohttp.
        """
        words: dict[str, Any] = {"cost": cost, "op": op, "idempotent": idempotent, "idempotency_key": idempotency_key}
        words |= {"body": body, "headers": headers, "trusted": trusted}
        made: AsyncCall = self._side.async_call(method, url, words)
        return made


class SyncRequests:
    """Requests from a thread."""

    __slots__ = ()
    _side: Any

    @property
    def client(self) -> Client:
        """An ``httpx.Client`` that keeps the resource's limits, gate, keys and classification."""
        client: Client = self._side.sync_client()
        return client

    @property
    def transport(self) -> httpx.BaseTransport:
        """See `Requests.transport`: ``httpx.Client(transport=job.transport)``."""
        return self.client._transport  # noqa: SLF001

    def call(
        self,
        method: str,
        url: str,
        *,
        cost: float | None = None,
        op: str | None = None,
        idempotent: bool | None = None,
        idempotency_key: str | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        trusted: bool = True,
    ) -> SyncCall:
        """See `Requests.call`: ``with job.call("POST", url) as call:``."""
        words: dict[str, Any] = {"cost": cost, "op": op, "idempotent": idempotent, "idempotency_key": idempotency_key}
        words |= {"body": body, "headers": headers, "trusted": trusted}
        made: SyncCall = self._side.sync_call(method, url, words)
        return made


class Through(Requests):
    """Another resource than the job's: its own address, credentials, gate and limits."""

    __slots__ = ("_side", "resource_key")

    def __init__(self, resource_key: str, side: Sender) -> None:
        self.resource_key, self._side = resource_key, side

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource_key}>"


class SyncThrough(SyncRequests):
    """`Through`, for plain handlers."""

    __slots__ = ("_side", "resource_key")

    def __init__(self, resource_key: str, side: Sender) -> None:
        self.resource_key, self._side = resource_key, side

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource_key}>"
