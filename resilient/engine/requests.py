"""How a handler sends requests: through its job's resource, or through another one (`Through`).

`Requests` and `SyncRequests` are what `Job`, `SyncJob` and the objects of ``job.through(...)`` have in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:  # a program that only enqueues needs none of it
    from collections.abc import Mapping

    import httpx

    from resilient.wire.call import AsyncCall, SyncCall
    from resilient.wire.client import AsyncClient, Client


ClientT = TypeVar("ClientT")
TransportT = TypeVar("TransportT")
CallT = TypeVar("CallT")


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


class _Requests(Generic[ClientT, TransportT, CallT]):
    """Requests through the resource of ``_side``, by the client and the calls of coroutines or of threads."""

    __slots__ = ()
    _side: Any

    def _client(self) -> Any:
        raise NotImplementedError

    def _call(self, method: str, url: str, words: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    @property
    def client(self) -> ClientT:
        """An ``httpx.AsyncClient`` (in plain handlers an ``httpx.Client``) that keeps the resource's rules.

        Its limits, gate, keys and classification.
        """
        client: ClientT = self._client()
        return client

    @property
    def transport(self) -> TransportT:
        """The client's transport, for an SDK that builds its own: ``httpx.AsyncClient(transport=job.transport)``.

        Closing such a client closes nothing.
        """
        transport: TransportT = self._client()._transport  # noqa: SLF001 - httpx has no name for it
        return transport

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
    ) -> CallT:
        """Admit one request that somebody else's client makes: ``async with job.call("POST", url) as call:``.

        In plain handlers ``with job.call(...)``. Entering admits or raises, before any I/O; send ``call.headers`` (to
        ``call.url``, if the provider takes its key in the URL), then say ``call.report(status, headers, body)``.
        ``cost`` is in units of the limits. ``op`` names the request (its key and mark), ``idempotent`` says that
        repeating it is harmless. ``body``, if given, tells requests of one name apart. ``headers``: what the client
        would send by itself, so that an idempotency key of the caller's is used, and one an SDK made up is not.
        ``trusted=False``: no credentials, wherever it goes. `resilient.adapters` do all this for requests and aiohttp.
        """
        words: dict[str, Any] = {"cost": cost, "op": op, "idempotent": idempotent, "idempotency_key": idempotency_key}
        made: CallT = self._call(method, url, words | {"body": body, "headers": headers, "trusted": trusted})
        return made


if TYPE_CHECKING:
    _OfCoroutines = _Requests[AsyncClient, httpx.AsyncBaseTransport, AsyncCall]
    _OfThreads = _Requests[Client, httpx.BaseTransport, SyncCall]
else:
    _OfCoroutines = _OfThreads = _Requests


class Requests(_OfCoroutines):
    """Requests from coroutines."""

    __slots__ = ()

    def _client(self) -> Any:
        return self._side.async_client()

    def _call(self, method: str, url: str, words: Mapping[str, Any]) -> Any:
        return self._side.async_call(method, url, words)


class SyncRequests(_OfThreads):
    """Requests from a thread."""

    __slots__ = ()

    def _client(self) -> Any:
        return self._side.sync_client()

    def _call(self, method: str, url: str, words: Mapping[str, Any]) -> Any:
        return self._side.sync_call(method, url, words)


class _Elsewhere:
    """Another resource than the job's: its own address, credentials, gate and limits."""

    __slots__ = ("_side", "resource_key")

    def __init__(self, resource_key: str, side: Sender) -> None:
        self.resource_key, self._side = resource_key, side

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource_key}>"


class Through(_Elsewhere, Requests):
    """What ``await job.through(...)`` gives."""

    __slots__ = ()


class SyncThrough(_Elsewhere, SyncRequests):
    """What ``job.through(...)`` gives a plain handler."""

    __slots__ = ()
