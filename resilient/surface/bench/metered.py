"""A provider that keeps limits nobody was told of: a process of its own, with a line in its log for each request.

``GET /ACCOUNT`` is answered after the meter's latency, or refused at once with 429 and what the meter says. It counts
when a request arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.bench.crew import BenchFailed
from resilient.testing.fake.meter import AtOnce, Bucket, Fixed, Shared, Sliding, Stray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.testing.fake.meter import Allowance


@dataclass(frozen=True, slots=True)
class Meter:
    """One kind of provider. ``make``: its allowance, of each account or (``shared``) of all together."""

    title: str
    make: Callable[[float], Allowance]  # scale
    seconds: float = 120.0
    accounts: int = 1
    shared: bool = False
    latency: float = 0.05
    jobs: int = 4_000
    slots: int = 50  # of each worker


METERS: Final = {
    "sliding": Meter("5/s sliding, unknown to us; three accounts", lambda k: Sliding(5, scale=k), accounts=3),
    "bucket": Meter("token bucket 40, leak 2/s", lambda k: Bucket(40, 2, scale=k)),
    "told": Meter(
        "100 a minute, fixed window, told by headers", lambda k: Fixed(100, 60, begun=20, tells=True, scale=k), 200
    ),
    "fixed": Meter("100 a minute, fixed window, not told", lambda k: Fixed(100, 60, begun=20, scale=k), 200),
    "once": Meter("4 at once, no hint (requests of 1 s)", lambda _: AtOnce(4, 1.0), latency=1.0),
    "changes": Meter(
        "20/s, then 5/s, then 20/s, a minute each",
        lambda k: Sliding([(0, 20), (60, 5), (120, 20)], scale=k), 180, jobs=6_000,
    ),
    "silent": Meter("5/s, 429 without any hint", lambda k: Sliding(5, hint="none", scale=k)),
    "application": Meter(
        "one limit for the application over 50 accounts, 30/s", lambda k: Sliding(30, scale=k), accounts=50,
        shared=True, jobs=10_000,
    ),
    "hour": Meter(
        "1,000 an hour, an hour being a minute", lambda k: Fixed(1000, 3600, begun=1800, scale=60 * k), 150, jobs=8_000
    ),
    "stray": Meter(
        "one stray 429 at a provider without limits", lambda _: Stray(30, 0), latency=0.4, slots=10, jobs=9_000
    ),
    "shared": Meter("another client uses half of the same 10/s", lambda k: Shared(Sliding(10, scale=k), 5)),
    "twelve": Meter("12/s, 429 without any hint (not tuned on)", lambda k: Sliding(12, hint="none", scale=k)),
    "ten": Meter("100 in 10 s, sliding (not tuned on)", lambda k: Sliding(100, 10, scale=k)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One request as the provider saw it: seconds since the first one, its account, whether it passed."""

    at: float
    account: str
    passed: bool


class Served:
    """The running provider."""

    def __init__(self, port: int, pipe: Any) -> None:
        self.address, self._pipe = f"http://127.0.0.1:{port}", pipe

    def log(self) -> list[Line]:
        """What it saw so far."""
        self._pipe.send("log")
        return [Line(*one) for one in self._pipe.recv()]


@contextlib.contextmanager
def metered(name: str, scale: float = 1.0) -> Iterator[Served]:
    """Serve the meter of that name; ``scale`` makes its windows shorter."""
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(target=_serve, args=(far_end, name, scale), daemon=True)
    process.start()
    far_end.close()
    try:
        try:
            port = int(pipe.recv())
        except EOFError:
            raise BenchFailed("the bench's provider died; its own output above says why") from None
        yield Served(port, pipe)
    finally:
        process.terminate()
        process.join(10)


def _serve(pipe: Any, name: str, scale: float) -> None:
    asyncio.run(_serving(pipe, _Provider(METERS[name], scale)))


async def _serving(pipe: Any, provider: _Provider) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(provider), "127.0.0.1", 0)
    loop.add_reader(pipe.fileno(), lambda: (pipe.recv(), pipe.send(provider.log)))
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Provider:
    def __init__(self, meter: Meter, scale: float) -> None:
        self.meter, self.scale = meter, scale
        self.log: list[tuple[float, str, bool]] = []
        self._allowances: dict[str, Allowance] = {}
        self._began: float | None = None

    def now(self) -> float:
        at = time.monotonic()
        self._began = at if self._began is None else self._began
        return at - self._began

    def ask(self, account: str) -> tuple[Allowance, bytes | None]:
        """Its allowance, and the refusal if it refuses."""
        now, name = self.now(), "" if self.meter.shared else account
        allowance = self._allowances.get(name)
        if allowance is None:
            allowance = self._allowances[name] = self.meter.make(self.scale)
        wait = allowance.ask(now)
        self.log.append((now, account, wait is None))
        if wait is None:
            return allowance, None
        hint = "" if wait.seconds is None else f"retry-after: {wait.seconds:g}\r\n"
        return allowance, f"HTTP/1.1 429 Too Many Requests\r\n{hint}content-length: 0\r\n\r\n".encode()

    def answer(self, allowance: Allowance) -> bytes:
        """A good answer, with what the meter tells."""
        allowance.leave(self.now())
        budget = allowance.remaining(self.now())
        heads = ""
        if budget is not None:
            limit, remaining, reset = budget
            heads = f"x-ratelimit-limit: {limit}\r\nx-ratelimit-remaining: {remaining}\r\n"
            heads += f"x-ratelimit-reset: {max(1, round(reset - self.now() + 0.499))}\r\n"
        return f"HTTP/1.1 200 OK\r\n{heads}content-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}".encode()


class _Connection(asyncio.Protocol):
    """Just enough HTTP/1.1: requests without a body, one at a time on a connection."""

    def __init__(self, provider: _Provider) -> None:
        self._provider, self._seen = provider, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._seen += data
        if not self._seen.endswith(b"\r\n\r\n"):
            return
        account = self._seen.split(b" ", 2)[1].decode().strip("/")
        self._seen = b""
        allowance, refusal = self._provider.ask(account)
        if refusal is not None:
            self._write(refusal)
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self._provider.meter.latency, lambda: self._write(self._provider.answer(allowance)))

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)
