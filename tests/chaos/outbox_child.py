"""A worker process that publishes to the tests' sink: ``outbox_child.py URL PORT LEASE [MUTANT]``."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import outbox_world

from resilient import Destination, Fixed, Retry
from resilient.wire.publishers.base import lost, refused

URL, PORT, LEASE = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
MUTANT = sys.argv[4] if len(sys.argv) > 4 else ""


@dataclass(frozen=True)
class Line(Destination):
    """One line an event, one line for an answer; a few connections, so that events are on their way together."""

    port: int

    async def connect(self):
        return Lines(self.port)


class Lines:
    def __init__(self, port):
        self.port, self.free = port, []

    async def publish(self, message):
        reader, writer = self.free.pop() if self.free else await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(message.body + b"\n")
            answer = await reader.readline()
        except OSError as error:
            answer = b""
            if MUTANT != "deaf":
                raise lost(str(error), "cut") from error
        if answer == b"taken\n":
            self.free.append((reader, writer))
        elif MUTANT == "deaf":  # takes whatever happened for a confirm
            writer.close()
        elif answer == b"refused\n":
            self.free.append((reader, writer))
            raise refused("refused", "refused")
        else:
            writer.close()
            raise refused("no answer", "no_answer")

    async def close(self):
        for _, writer in self.free:
            writer.close()


async def main():
    retry = Retry(max_attempts=None, delay=Fixed(0.05), max_rescues=1_000)
    app = outbox_world.app(URL, Line(PORT, retry=retry, timeout=5))
    await app.worker(concurrency=20, lease=LEASE, grace=5).run()
    await app.close()


if __name__ == "__main__":
    atexit.register(gc.freeze)  # nothing is looked through as it ends
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(main())
