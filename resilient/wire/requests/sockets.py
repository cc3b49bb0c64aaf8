"""The sockets that a handler in a thread waits for, so that the job's timeout can shut them.

A timeout for silence never ends an answer that comes byte by byte, and a thread cannot be interrupted; but its socket
can be shut down. A `Line` keeps each socket while the thread waits for it (`Line.waiting`), and a connection of another
library's pool while a request uses it (`hold`). `Line.cut` shuts them all down, from any thread, and refuses further
ones. Idle connections in a pool are left alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import httpcore

from resilient.wire.requests.streams import is_readable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_thread: Final = threading.local()


class Line:
    """The sockets that one execution's thread waits for, and the threads that its handler started."""

    __slots__ = ("_lock", "_sockets", "broke", "is_cut")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: dict[int, socket.socket] = {}
        self.is_cut = False
        self.broke = False  # `cut` shut some socket: what was read from it may be incomplete

    def cut(self) -> None:
        """Shut its sockets down, and refuse further ones. Any thread may call it, more than once."""
        with self._lock:
            self.is_cut = True
            # Nobody waits for one that is closed already: its fileno is -1.
            self.broke = self.broke or any(one.fileno() >= 0 for one in self._sockets.values())
            for one in self._sockets.values():
                with contextlib.suppress(OSError):  # it is closed already
                    socket.socket.shutdown(one, socket.SHUT_RDWR)  # not TLS's own: that is not safe from outside

    def hold(self, one: socket.socket) -> bool:
        """Note a socket; False if the line is cut."""
        with self._lock:
            if not self.is_cut:
                self._sockets[id(one)] = one
            return not self.is_cut

    def release(self, one: socket.socket) -> None:
        """Forget a socket: the thread waits for it no longer."""
        with self._lock:
            self._sockets.pop(id(one), None)

    @contextlib.contextmanager
    def waiting(self, one: socket.socket, error: type[Exception]) -> Iterator[None]:
        """Hold a socket during one operation. Raises ``error`` if the line is cut before or meanwhile."""
        if not self.hold(one):
            raise error(_OVER)
        try:
            yield
        except Exception as caught:
            if self.is_cut and not isinstance(caught, error):
                raise error(_OVER) from caught
            raise
        finally:
            self.release(one)
        if self.is_cut:
            raise error(_OVER)


_OVER: Final = "the job's time is over, so its connection was shut"


class _Nobody(Line):
    """The line of threads that run no execution: it is never cut."""

    __slots__ = ()

    def hold(self, one: socket.socket) -> bool:  # noqa: ARG002
        return True


_NOBODY: Final = _Nobody()


def line() -> Line:
    """The line of this thread."""
    own: Line = getattr(_thread, "line", _NOBODY)
    return own


@contextlib.contextmanager
def using(one: Line) -> Iterator[None]:
    """Let this thread wait on behalf of ``one`` meanwhile."""
    _thread.line, _thread.is_own = one, True
    try:
        yield
    finally:
        del _thread.line, _thread.is_own


def join(one: Line) -> None:
    """Let a thread that a handler started wait on behalf of ``one``, until it sends for another execution."""
    if not hasattr(_thread, "is_own"):
        _thread.line = one


_LEAST: Final = 0.01  # seconds to connect to one address


def end_of(timeout: float | None) -> float | None:
    """When ``timeout`` seconds from now are over, by ``time.monotonic``."""
    return None if timeout is None else time.monotonic() + timeout


def share_of(end: float | None, untried: int) -> float | None:
    """The seconds for the next of ``untried`` addresses: whoever owns the name says how many there are."""
    return None if end is None else max(_LEAST, (end - time.monotonic()) / untried)


# -- names ------------------------------------------------------------------------------------------------------------
#
# No thread can end a lookup that a silent name server keeps. So another thread makes it, for all who want that name at
# the time, and whoever waits for it does not wait for longer than its time to connect.

Rows: TypeAlias = "list[tuple[Any, ...]]"


class _Lookups:
    """The lookups of a process's threads."""

    def __init__(self) -> None:
        self.begin_anew()
        if hasattr(os, "register_at_fork"):  # not on Windows, which forks nothing
            os.register_at_fork(after_in_child=self.begin_anew)

    def begin_anew(self) -> None:
        """Forget those of the parent, whose threads a child has not."""
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, int], Future[Rows]] = {}

    def ask(self, host: str, port: int) -> Future[Rows]:
        """The lookup of a name, which is begun unless it is under way."""
        name = host, port
        with self._lock:
            if (answer := self._under_way.get(name)) is None:
                answer = Future()
                threading.Thread(target=self._ask, args=[name, answer], name="resilient-lookup", daemon=True).start()
                self._under_way[name] = answer
        return answer

    def _ask(self, name: tuple[str, int], answer: Future[Rows]) -> None:
        rows, failure = list[tuple[Any, ...]](), None
        try:
            rows = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
        except Exception as error:  # noqa: BLE001 - raised where it was asked for
            failure = error
        with self._lock:
            self._under_way.pop(name, None)
        if failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(rows)


_LOOKUPS: Final = _Lookups()


def addresses_of(host: str, port: int, timeout: float | None) -> list[str]:
    """The addresses of a host, looked up within ``timeout``. Raises `httpcore.ConnectError`, `ConnectTimeout`."""
    try:
        return in_order(_LOOKUPS.ask(host, port).result(timeout))
    except TimeoutError:
        raise httpcore.ConnectTimeout(f"nobody says where {host!r} is") from None
    except (OSError, UnicodeError) as error:  # a label of more than 63 characters is no OSError
        raise unresolved(host, error) from error


def in_order(rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """The addresses of a lookup's rows, each once."""
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


def unresolved(host: str, error: Exception) -> httpcore.ConnectError:
    """The error for a host that has no address."""
    return httpcore.ConnectError(f"{host!r} cannot be resolved: {error}")


class Backend(httpcore.NetworkBackend):
    """httpcore's own for threads: each operation is on the thread's line, and a host's addresses share its time."""

    def __init__(self) -> None:
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Try the addresses of a host one after the other; each gets its share of what ``timeout`` leaves them."""
        if line().is_cut:
            raise httpcore.ConnectTimeout(_OVER)
        end = end_of(timeout)
        addresses = addresses_of(host, port, timeout)
        for untried, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            try:
                made = self._inner.connect_tcp(address, port, share_of(end, untried), local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if untried == 1 or line().is_cut:
                    raise
            else:
                return _Stream(made)
        raise httpcore.ConnectError(f"{host} has no address")

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        """As httpcore's."""
        return _Stream(self._inner.connect_unix_socket(path, timeout, socket_options))

    def sleep(self, seconds: float) -> None:
        """As httpcore's."""
        self._inner.sleep(seconds)


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner, self._socket = inner, inner.get_extra_info("socket")

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with line().waiting(self._socket, httpcore.ReadTimeout):
            return self._inner.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with line().waiting(self._socket, httpcore.WriteTimeout):
            try:
                self._inner.write(buffer, timeout)
            except httpcore.WriteTimeout:
                if is_readable(self._socket):  # it may be refused already: httpcore goes on to read
                    raise httpcore.WriteError from None
                raise

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        with line().waiting(self._socket, httpcore.ConnectTimeout):
            made = self._inner.start_tls(ssl_context, server_hostname, timeout)
        if isinstance(sock := made.get_extra_info("socket"), ssl.SSLSocket):
            # An end that TLS does not tell is a cut (RFC 9112, 9.8).
            sock.suppress_ragged_eofs = False  # type: ignore[attr-defined]  # typeshed leaves it out
        return _Stream(made)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)

    def close(self) -> None:
        self._inner.close()
