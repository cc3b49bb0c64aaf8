"""What the outbox's chaos tests share: business transactions that publish, a destination that misbehaves, the checker.

A business transaction raises the version of a row (an aggregate) and publishes an event that carries it, so the rows
say afterwards what should have arrived, and in which order. The destination writes down what it took before it
answers; it refuses some, and of some it loses the answer.

O1 every committed version arrived (lost); O2 nothing arrived that was not committed (phantom); O3 the first arrivals
of a key are in the order of its versions; O4 the events' own numbers are the versions, without gaps; O5 few duplicates
for each harm, which meets up to twenty events under way, beyond those the destination caused by losing its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections import defaultdict
from itertools import pairwise

import sqlalchemy as sa
from sqlalchemy.orm import Session

from resilient import Event, Resilient

REPEATED = 2  # events for each harm, on the average


class Changed(Event, type="thing.changed"):
    thing: str
    version: int


def app(url, destination=None):
    async def nowhere(_message):
        raise AssertionError("this process publishes nothing")

    return Resilient(url, destinations={"sink": destination or nowhere}, routes={Changed: ["sink"]}, upgrade=False)


class Sink:
    """A server in a thread: one line in, one line out. ``arrived``: what it took, in its order."""

    def __init__(self, seed, *, refuse=0.05, drop=0.05):
        self.dice, self.refuse, self.drop = random.Random(seed), refuse, drop
        self.arrived, self.dropped = [], 0
        self._started, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while line := await reader.readline():
                if not line.endswith(b"\n"):
                    break
                roll = self.dice.random()
                if roll < self.refuse:
                    writer.write(b"refused\n")
                    continue
                event = json.loads(line)
                data = event["data"]
                self.arrived.append((data["thing"], data["version"], int(event.get("sequence", 0))))
                if roll < self.refuse + self.drop:
                    self.dropped += 1
                    break
                writer.write(b"taken\n")
        writer.close()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


class Business:
    """Writers in threads; each commits most of its transactions and rolls back some."""

    def __init__(self, database, seed, *, things=50, writers=3, pause=0.02, publish=None):
        self.database, self.things, self.pause = database, things, pause
        self.app = app(database)
        self.publish = publish or self.app.outbox.publish
        self._stop, self.commits = threading.Event(), 0
        with database.sync_engine.begin() as c:
            c.execute(sa.text("CREATE TABLE thing (name varchar(20) PRIMARY KEY, version int)"))
            c.execute(sa.text("CREATE TABLE change (name varchar(20), version int, PRIMARY KEY (name, version))"))
            for n in range(things):
                c.execute(sa.text("INSERT INTO thing VALUES (:name, 0)"), {"name": f"t{n}"})
        self._threads = [threading.Thread(target=self._write, args=(random.Random(seed + n),)) for n in range(writers)]

    def start(self):
        for one in self._threads:
            one.start()
        return self

    def stop(self):
        self._stop.set()
        for one in self._threads:
            one.join(30)

    def _write(self, dice):
        while not self._stop.wait(self.pause):
            with contextlib.suppress(sa.exc.DBAPIError):  # its connection was cut: the rows say what became of it
                self._change(dice)

    def _change(self, dice):
        name = f"t{dice.randrange(self.things)}"
        with Session(self.database.sync_engine) as s:
            raised = "UPDATE thing SET version = version + 1 WHERE name = :name RETURNING version"
            version = s.execute(sa.text(raised), {"name": name}).scalar_one()
            s.execute(sa.text("INSERT INTO change VALUES (:name, :version)"), {"name": name, "version": version})
            self.publish(s, Changed(thing=name, version=version), key=name)
            if dice.random() < 0.15:
                s.rollback()
            else:
                s.commit()
                self.commits += 1

    def committed(self):
        with self.database.sync_engine.begin() as c:
            return {(name, version) for name, version in c.execute(sa.text("SELECT name, version FROM change"))}


def check(committed, arrived, dropped=0, harms=0):
    """The broken rules, each as one line. ``harms``: how often a worker was killed, stopped or cut off."""
    broken, first, seen = [], defaultdict(list), set()
    for name, version, number in arrived:
        if (name, version) in seen:
            continue
        seen.add((name, version))
        first[name].append(version)
        if number != version:
            broken.append(f"O4 {name}: version {version} has number {number}")
    broken += [f"O1 {name}: version {version} was committed and never arrived" for name, version in committed - seen]
    broken += [f"O2 {name}: version {version} arrived and was never committed" for name, version in seen - committed]
    for name, versions in first.items():
        broken += [f"O3 {name}: {b} first arrived after {a}" for a, b in pairwise(versions) if b < a]
    if (more := len(arrived) - len(seen) - dropped) > max(20, REPEATED * harms):
        broken.append(f"O5 {more} of {len(arrived)} arrivals are duplicates, after {harms} harms")
    return broken
