"""``bench http``: jobs of one 50 ms request each, beside bare asyncio loops, each over an ``httpx.AsyncClient``.

The provider is a process of its own and as cheap as can be (asyncio, no framework): its CPU is shared with
what is measured. Both sides send the same requests with the same number at once, one after the other in the
same run. Each bare loop has a client of its own, which is httpx at its best: one client for all looks at each of its
100 connections for every request, and sends a hundred requests a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from typing import TYPE_CHECKING, Any, Final

import httpx

from resilient import Item
from resilient.surface.bench.crew import (
    BenchFailed,
    Load,
    Server,
    account,
    build,
    get,
    rate,
    run_crew,
    run_measured,
    work,
)
from resilient.surface.loop import run
from resilient.surface.scratch import scratch
from resilient.wire.requests.pool import public_certificates

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from resilient.surface.bench.crew import Crew, Start

_LATENCY: Final = 0.05
_ANSWER: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def http(
    url: str | None, *, jobs: int, resources: int, workers: int, concurrency: int, limits: bool, bare: bool = True
) -> dict[str, Any]:
    """Push ``jobs`` requests, ``concurrency`` at once in each of ``workers`` processes."""
    with _provider() as address:
        loops = [run_crew(_bare, workers, address, jobs // workers, concurrency)] if bare else []
        with scratch(url, "bench") as place:
            app = build(place, limits=limits)
            try:
                app.enqueue_many_sync(get, [Item(address, resource_key=account(n, resources)) for n in range(jobs)])
                done = multiprocessing.get_context("spawn").Array("q", workers, lock=False)
                server = Server(place)
                crew, cpu = run_measured(server, work, workers, done, Load(place, jobs, concurrency, limits))
            finally:
                app.database.close_sync()
        if bare:  # before and after: machines change their pace
            loops.append(run_crew(_bare, workers, address, jobs // workers, concurrency))
    return _figures(jobs, crew, cpu) | (_compared(jobs, crew, loops) if bare else {})


def _figures(jobs: int, crew: Crew, cpu: float) -> dict[str, Any]:
    return {
        "jobs_per_second": rate(jobs, crew.seconds),
        "cpu_seconds": cpu,
        "worker_cpu_seconds": round(crew.cpu, 3),
        "cpu_ms_a_request": round(crew.cpu * 1000 / jobs, 3),
        "worker_memory_mb": crew.memory,
        "useless_executions": crew.total("executions") - jobs,
    }


def _compared(jobs: int, crew: Crew, loops: list[Crew]) -> dict[str, Any]:
    per_second = sum(rate(loop.total("sent"), loop.seconds) for loop in loops) / len(loops)
    return {
        "bare_per_second": round(per_second, 1),
        "share_of_bare": round(rate(jobs, crew.seconds) / per_second, 3),
        "bare_cpu_seconds": round(sum(loop.cpu for loop in loops) / len(loops), 3),
        "bare_cpu_ms_a_request": round(sum(loop.cpu for loop in loops) * 1000 / len(loops) / jobs, 3),
    }


def _bare(start: Start, address: str, jobs: int, concurrency: int) -> dict[str, Any]:
    """The bare loop (a task of `run_crew`)."""
    return run(_bare_loop(start, address, jobs, concurrency))


async def _bare_loop(start: Start, address: str, jobs: int, concurrency: int) -> dict[str, Any]:
    numbers = iter(range(jobs))

    async def loop(client: httpx.AsyncClient) -> None:
        for _ in numbers:
            (await client.get(address)).raise_for_status()

    async with contextlib.AsyncExitStack() as stack:
        options: dict[str, Any] = {"timeout": 60, "trust_env": False, "verify": public_certificates()}
        clients = [await stack.enter_async_context(httpx.AsyncClient(**options)) for _ in range(concurrency)]
        start()
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(loop(client))
        return {"sent": jobs, "finished_at": time.perf_counter()}


# -- the provider --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _provider() -> Iterator[str]:
    """A process that answers every request after 50 ms; yields its address."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=_serve, args=(far,), daemon=True)
    process.start()
    far.close()
    try:
        yield f"http://127.0.0.1:{_port(near)}/"
    finally:
        process.terminate()
        process.join(10)


def _port(pipe: Connection) -> int:
    try:
        return int(pipe.recv())
    except EOFError:
        raise BenchFailed("the bench's provider died; its own output above says why") from None


def _serve(pipe: Connection) -> None:
    asyncio.run(_serving(pipe))


async def _serving(pipe: Connection) -> None:
    server = await asyncio.get_running_loop().create_server(_Slow, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Slow(asyncio.Protocol):
    """Just enough HTTP/1.1: requests without a body, one at a time on a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(b"\r\n\r\n"):
            self._received = b""
            asyncio.get_running_loop().call_later(_LATENCY, self._answer)

    def _answer(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(_ANSWER)
