"""Connections to hosts that an account chose: resolved here, and only public addresses are connected to.

The connection goes to the very address that was checked. So a name that resolves differently the second time (DNS
rebinding) gains nothing, nor do the many ways to write 127.0.0.1. Behind a proxy the proxy resolves names, so it must
guard, too. Without this, a customer could name a host of our own network and have us send requests to it
(https://owasp.org/www-community/attacks/Server_Side_Request_Forgery).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import httpcore
import httpx

from resilient.core.base.errors import Failure, FailureKind, Permanent
from resilient.core.base.hosts import denied
from resilient.core.base.loggers import apart
from resilient.core.base.loops import PerLoop
from resilient.wire.requests.sockets import Backend, addresses_of, end_of, in_order, share_of, unresolved

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence


# -- lookups ----------------------------------------------------------------------------------------------------------
#
# Names that accounts chose are looked up in threads of their own. The owner of a name owns its name server, too, and
# may keep that silent for half a minute. No thread that others need may wait for it, and the event loop's own threads
# look up the names of all others. A name is looked up once for all who want it at the same time; the threads end with
# the process.
#
# At most `MOST_LOOKUPS` names are looked up at once. A lookup that takes longer than `SOON` gives its place back, as
# long as no more than `MOST_SILENT` have done so. Its host then has no place among the others until it answers as
# soon as they do: such hosts wait for each other. So silent hosts keep nobody else waiting for longer than that.

Rows: TypeAlias = "list[tuple[Any, ...]]"
MOST_LOOKUPS: Final = 64  # threads, of one event loop
MOST_SILENT: Final = 64  # further threads, which gave their places back
MOST_AGAIN: Final = 16  # further threads, for hosts that were silent before
SOON: Final = 2.0  # seconds in which a name server answers
_MOST_REMEMBERED: Final = 10_000  # hosts


class _Lookups:
    """The lookups of one event loop."""

    def __init__(self) -> None:
        self.places, self.places_again = asyncio.Semaphore(MOST_LOOKUPS), asyncio.Semaphore(MOST_AGAIN)
        self.under_way: dict[tuple[str, int], asyncio.Future[Rows]] = {}
        self.silent: dict[str, None] = {}  # hosts, the oldest first
        self.given_back = 0  # places of lookups that are under way

    def remember(self, host: str) -> None:
        """A host was silent."""
        self.silent.pop(host, None)
        if len(self.silent) >= _MOST_REMEMBERED:
            del self.silent[next(iter(self.silent))]
        self.silent[host] = None


class _Place:
    """The place of one lookup among those that are under way."""

    def __init__(self, lookups: _Lookups, host: str) -> None:
        self._lookups, self._host = lookups, host
        self._is_again = host in lookups.silent
        self.room = lookups.places_again if self._is_again else lookups.places
        self._is_given_back = self._is_late = False

    def be_late(self) -> None:
        """It takes longer than `SOON`."""
        self._is_late = True
        self._lookups.remember(self._host)
        if not self._is_again and self._lookups.given_back < MOST_SILENT:
            self._is_given_back = True
            self._lookups.given_back += 1
            self.room.release()

    def end(self) -> None:
        """It has ended."""
        if self._is_given_back:
            self._lookups.given_back -= 1
        else:
            self.room.release()
        if not self._is_late:
            self._lookups.silent.pop(self._host, None)


_of_loops: Final = PerLoop(_Lookups)


async def look_up(host: str, port: int) -> Rows:
    """The rows of `socket.getaddrinfo`. Raises what that raises."""
    loop = asyncio.get_running_loop()
    lookups, name = _of_loops.of(loop), (host, port)
    if name not in lookups.under_way:
        place = _Place(lookups, host)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(place.room)
            if name not in lookups.under_way:
                lookups.under_way[name] = _start(loop, lookups, name, place)
                stack.pop_all()  # the end of the lookup releases the semaphore
    return await asyncio.shield(lookups.under_way[name])


def _start(
    loop: asyncio.AbstractEventLoop, lookups: _Lookups, name: tuple[str, int], place: _Place
) -> asyncio.Future[Rows]:
    answer: asyncio.Future[Rows] = loop.create_future()
    # asyncio warns of an error that nobody reads, and all who waited may be gone
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())

    def end(rows: Rows | None, error: Exception | None) -> None:
        timer.cancel()
        del lookups.under_way[name]
        place.end()
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(rows or [])

    def ask() -> None:
        rows, failure = None, None
        try:
            rows = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(end, rows, failure)

    threading.Thread(target=ask, name="resilient-lookup", daemon=True).start()
    timer = loop.call_later(SOON, place.be_late, context=apart())  # of a thread that runs: else nothing would end it
    return answer


# -- the guard --------------------------------------------------------------------------------------------------------

GUARDED: Final = "resilient_guarded"  # an extension of a request: its host was chosen by an account


class AddressDenied(httpx.ConnectError, Permanent):
    """The host that an account chose leads to an address that is not public: nothing was sent."""

    def __init__(self, host: str, address: str) -> None:
        Exception.__init__(
            self,
            f"{host!r}, which an account chose, is at {address}: that is not a public address, so nothing was sent"
            f" (for development and networks of your own: provider(private_hosts=({host!r},)))",
        )
        self._request: httpx.Request | None = None
        self.failure = Failure(FailureKind.PERMANENT, code="address_denied")


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """For coroutines. ``allow``: hosts and addresses that need not be public; ``refusal``: makes the error."""

    def __init__(
        self,
        allow: Iterable[str] = (),
        refusal: Callable[[str, str], Exception] = AddressDenied,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        """``network``: what opens the connections."""
        self._allow, self._refusal = frozenset(name.lower() for name in allow), refusal
        self._network = network or httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve, check, connect, within ``timeout`` altogether. Raises `AddressDenied`, or what ``refusal`` makes."""
        error: Exception | None = None
        end = end_of(timeout)
        try:
            async with asyncio.timeout(timeout):
                addresses = await resolved(host, port, self._allow, self._refusal)
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"nobody says where {host!r} is") from None
        for untried, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            try:
                return await self._network.connect_tcp(
                    address, port, share_of(end, untried), local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore.ConnectError(f"{host!r} has no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - httpcore's signature
        socket_options: Any = None,  # noqa: ARG002 - the same
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: a socket of this machine is no public address."""
        raise self._refusal(path, "a socket of this machine")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class PublicNetworkSync(httpcore.NetworkBackend):
    """For threads."""

    def __init__(self) -> None:
        self._network = Backend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        """Resolve, check, connect; see `Backend.connect_tcp`. Raises `AddressDenied`."""
        error: Exception | None = None
        end = end_of(timeout)
        addresses = _require_public(host, addresses_of(host, port, timeout))
        for untried, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            try:
                return self._network.connect_tcp(address, port, share_of(end, untried), local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore.ConnectError(f"{host!r} has no address")

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ARG002 - httpcore's signature
        socket_options: Any = None,  # noqa: ARG002 - the same
    ) -> httpcore.NetworkStream:
        """Refuse: a socket of this machine is no public address."""
        raise AddressDenied(path, "a socket of this machine")


async def resolved(
    host: str,
    port: int,
    allow: Collection[str] = (),
    refusal: Callable[[str, str], Exception] = AddressDenied,
) -> Sequence[str]:
    """The addresses of a host, all of them public. Raises `AddressDenied`, `httpcore.ConnectError`."""
    try:
        rows = await look_up(host, port)
    except (OSError, UnicodeError) as error:
        raise unresolved(host, error) from error
    return _require_public(host, in_order(rows), allow, refusal)


def _require_public(
    host: str,
    addresses: Sequence[str],
    allow: Collection[str] = (),
    refusal: Callable[[str, str], Exception] = AddressDenied,
) -> Sequence[str]:
    if host.lower() not in allow:
        for address in addresses:
            if address not in allow and denied(address):
                raise refusal(host, address)
    return addresses
