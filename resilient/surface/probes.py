"""A worker's small HTTP server: `/metrics` for Prometheus, `/livez` and `/readyz` for whoever starts and stops it.

It runs in threads, so that it answers while the event loop is blocked. An outage of a provider changes neither answer.
One of the database makes a worker not ready, and never not alive: it waits, and a restart would not bring the database
back.
"""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.base.bounds import whole_number
from resilient.core.base.errors import InvalidInput, MissingExtra, SetupError
from resilient.core.base.loggers import logger
from resilient.surface.cli.exits import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.engine.app.app import Resilient
    from resilient.engine.run.worker import Worker
    from resilient.surface.shards import Shards

log = logger("worker")
BEAT: Final = 0.5  # seconds
STILL: Final = 60.0  # seconds for which a loop may stand still; as long as a lease by default
PLAIN: Final = "text/plain; charset=utf-8"
_ADDRESS: Final = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:]+\]|[^:\[\]]*)(?P<colon>:))?(?P<port>\d{1,5})")
_HIGHEST: Final = 65_535
_BODY: Final = 65_536  # bytes of a body that nobody wants


class Answer(NamedTuple):
    """What a path answers."""

    status: int
    text: bytes
    media: str = PLAIN


class Address(NamedTuple):
    """Where to listen; an empty host is every address of this machine."""

    host: str
    port: int

    @classmethod
    def of(cls, option: str, text: str) -> Address:
        """``9100``: on this machine alone; ``:9100``: on all its addresses; ``10.0.0.5:9100``, ``[::1]:9100``."""
        parts = _ADDRESS.fullmatch(text)
        if parts is None or int(parts["port"]) > _HIGHEST:
            raise InvalidInput(
                f"{option} {text!r}: write a port (this machine alone), :PORT (all addresses) or HOST:PORT"
            )
        host = (parts["host"] or "").strip("[]")
        return cls(host if parts["colon"] else "127.0.0.1", int(parts["port"]))


class Server:
    """Serves some paths at one address until it is closed."""

    def __init__(self, address: Address, paths: Mapping[str, Callable[[], Answer]]) -> None:
        self._server = _HTTPServer(("", 0), type("Handler", (_Handler,), {"paths": paths}), bind_and_activate=False)
        self._server.socket.close()
        try:
            self._server.socket = _listening(address)
        except OSError as error:
            raise SetupError(
                f"cannot listen on {address.host or '*'}:{address.port}: {reason_of(error)}; end what listens there, or"
                " say another address"
            ) from error
        self.address: tuple[Any, ...] = self._server.socket.getsockname()
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="resilient-probes", daemon=True
        )
        self._thread.start()
        log.info("%s at http://%s:%d", ", ".join(paths), address.host or "*", self.address[1])

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _listening(address: Address) -> socket.socket:
    if not address.host and socket.has_dualstack_ipv6():
        return socket.create_server(("", address.port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family)


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - as socketserver calls it
        """Note what a thread failed of: socketserver would write it past the log, whatever its shape is.

        Who looks whether the port is open, or gives up waiting, cuts the connection: that is no news.
        """
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, TimeoutError)):
            log.error("a request to the metrics or probes failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    paths: Mapping[str, Callable[[], Answer]]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "resilient", ""
    timeout = 10  # seconds for which a connection may be idle

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in self.paths:
            self._write(self.paths[path]())
        else:
            self._write(Answer(HTTPStatus.NOT_FOUND, f"there are {', '.join(self.paths)}\n".encode()))

    do_HEAD = do_GET  # noqa: N815 - what http.server calls

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Refuse what http.server would refuse with a page: another method, or what is no request."""
        self.request_version = self.protocol_version  # of what is no request it is 0.9, whose answers have no status
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._drain()
            text = f"{', '.join(self.paths)}: GET or HEAD, not {self.command[:20]}\n"
            refusal = Answer(HTTPStatus.METHOD_NOT_ALLOWED, text.encode())
            self._write(refusal, Allow="GET, HEAD", Connection="close")
        else:
            self._write(Answer(code, f"{HTTPStatus(code).phrase}\n".encode()), Connection="close")

    def _drain(self) -> None:
        """Read the body: what is not read when a connection ends may take the answer along."""
        length = whole_number(self.headers.get("Content-Length", ""))
        if length is not None:
            self.rfile.read(min(length, _BODY))

    def _write(self, answer: Answer, **headers: str) -> None:
        self.send_response(answer.status)
        fields = {"Content-Type": answer.media, "Content-Length": str(len(answer.text)), **headers}
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.text)

    def log_message(self, *_: Any) -> None:
        """A probe a second is no news."""


class Probes:
    """What a worker's servers answer; ``parts``: the worker of each shard, under "" where there are none.

    Its beat runs on the worker's loop, before the database is reached too.
    """

    def __init__(self, app: Resilient | Shards, parts: Mapping[str, tuple[Resilient, Worker]]) -> None:
        self._app, self._parts = app, parts
        self._beat_at = time.monotonic()
        self._servers: list[Server] = []
        self._beating: asyncio.Task[None] | None = None

    def beat(self) -> None:
        """Begin to notice, on the running loop, when it moves."""
        self._beating = self._beating or asyncio.create_task(self._beat(), name="resilient-beat")

    def open(self, *, metrics: str | None, health: str | None) -> list[Server]:
        """Serve what is asked for, on the running loop; both at one address if that is the same."""
        paths: dict[Address, dict[str, Callable[[], Answer]]] = {}
        if metrics is not None:
            paths.setdefault(Address.of("--metrics", metrics), {})["/metrics"] = self._scrape()
        if health is not None:
            paths.setdefault(Address.of("--health", health), {}).update({"/livez": self.livez, "/readyz": self.readyz})
        if paths:
            self.beat()
        for address, answers in paths.items():
            self._servers.append(Server(address, answers))
        return self._servers

    def close(self) -> None:
        """Serve nothing more."""
        for server in self._servers:
            server.close()
        if self._beating is not None:
            self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(BEAT)

    def _scrape(self) -> Callable[[], Answer]:
        try:
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise MissingExtra("metrics need prometheus-client: pip install 'resilient-engine[metrics]'") from error
        from resilient.surface.metrics import registry  # noqa: PLC0415 - it needs the extra

        own = registry(self._app)
        return lambda: Answer(HTTPStatus.OK, generate_latest(own), CONTENT_TYPE_LATEST)

    def livez(self) -> Answer:
        """Whether the event loop beats."""
        still = time.monotonic() - self._beat_at
        if still > STILL:
            return verdict({"loop": f"has stood still for {still:.0f} s"})
        return verdict({})

    def readyz(self) -> Answer:
        """Whether it takes jobs: the database answers, its schema fits, and the worker is not being stopped.

        Of several shards one is enough: a database that is away stops its accounts alone.
        """
        troubles = {name: _troubles(app, worker) for name, (app, worker) in self._parts.items()}
        if not all(troubles.values()):
            return verdict({})
        return verdict({
            f"{name} {what}".lstrip(): text for name, each in troubles.items() for what, text in each.items()
        })  # fmt: skip


def _troubles(app: Resilient, worker: Worker) -> dict[str, str]:
    troubles = dict[str, str]()
    if worker.stopping:
        troubles["worker"] = "is draining"
    if not app.ground.tables.are_ready:
        troubles["schema"] = "is not checked yet"
    if not worker.link.is_signed_on or not worker.heartbeat.is_answered:
        troubles["database"] = "does not answer"
    return troubles


def verdict(troubles: Mapping[str, str]) -> Answer:
    """200, or 503 with a line for each trouble."""
    if not troubles:
        return Answer(HTTPStatus.OK, b"ok\n")
    text = "".join(f"{name} {what}\n" for name, what in troubles.items())
    return Answer(HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
