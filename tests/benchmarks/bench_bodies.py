"""What answers that are made to fill the memory cost: one account whose server packs 64 MiB into 64 KiB.

    python tests/benchmarks/bench_bodies.py [--answers 20] [--mib 63]

Prints one JSON object: the most memory of the process (MB over what it had before) while one account asks for so many
at once and keeps what it gets, how many it got, and what another account gets meanwhile; with the bound, and with one
so high that it binds nobody. Each in a process of its own, the server beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from resilient.wire.requests.answer import NoRoomForAnswer
from resilient.wire.requests.client import build_async_client
from resilient.wire.requests.hooks import Permit
from resilient.wire.requests.pool import Pool, PoolSettings
from resilient.wire.requests.request_log import RequestLog

MIB = 1024 * 1024


class Nothing:
    """A RequestHooks that lets everything go."""

    base_key = "job"

    def __init__(self, account):
        self.resource_key = account

    def now(self):
        return datetime.now(UTC)

    async def admit(self, asked):
        return Permit(asked)

    def is_late(self, _permit):
        return False

    async def answered(self, _permit, _answer, _failure):
        return None

    async def failed(self, _permit, _failure):
        return None

    def abandoned(self, _permit):
        return None

    def cut_off(self, _permit, **_):
        return None


async def serve(mib):
    """A server that answers everything with so many MiB of zeros, packed."""
    body = gzip.compress(bytes(mib * MIB))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    await server.serve_forever()


def memory():
    """The most that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def ask(port, answers, bodies):
    """Ask for so many at once and keep them."""
    pool = Pool(PoolSettings(bodies=bodies, tries=1, read=300.0, connect=60.0))

    async def one(account):
        client = build_async_client(RequestLog(Nothing(account)), pool, f"http://127.0.0.1:{port}")
        try:
            return await client.get("/")
        except NoRoomForAnswer:
            return None

    before = memory()
    kept = [one for one in await asyncio.gather(*(one("p/evil") for _ in range(answers))) if one is not None]
    other = await one("p/honest")
    print(json.dumps({"mb": round(memory() - before), "bodies": len(kept), "other_account": other is not None}))  # noqa: T201


def main():
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--mib", type=int, default=63)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--ask", nargs=2, type=int)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.mib))
    elif options.ask:
        asyncio.run(ask(options.ask[0], options.answers, options.ask[1]))
    else:
        this = [sys.executable, __file__, "--answers", str(options.answers), "--mib", str(options.mib)]
        with subprocess.Popen([*this, "--serve"], stdout=subprocess.PIPE, text=True) as server:
            port = server.stdout.readline().strip()
            figures = {
                name: json.loads(subprocess.check_output([*this, "--ask", port, str(bodies)], text=True))
                for name, bodies in (("bounded", PoolSettings().bodies), ("unbounded", 2**50))
            }
            server.terminate()
        print(json.dumps({"answers": options.answers, "mib": options.mib, **figures}))  # noqa: T201


if __name__ == "__main__":
    main()
