"""What an event costs the transaction it is published in: ``python tests/benchmarks/bench_publish.py postgresql://...``.

Eight clients, each a process of its own (``--threads``: of one process, which then shares one interpreter lock), do the
same business transaction through a SQLAlchemy Session, in turns so that a machine's moods meet all of them:

- plain: nothing else;
- by hand: and one ``INSERT INTO some_outbox (id, key, payload)``, what people write themselves, without order,
  checks, destinations or a wake-up;
- event: and one `publish` with a key;
- unordered: and one `publish` without.

Two transactions: *small* inserts a row and updates one of 10,000 counters; *TPC-B-like* is pgbench's (three updates, a
SELECT and an INSERT, 10 branches). Keys are 10,000. Before each turn the outbox is emptied, as a relay that keeps up
would, but the keys are known. Rates and shares are medians over the turns, each turn's share being of its own plain
rate; CPU is what one transaction took, in microseconds: of the
clients, and of the whole server if it runs here (its writers included).
"""
# ruff: noqa: T201 - a script that prints

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[2]))

import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from resilient import Event, Resilient
from resilient.store.db.schema import upgrade_sync
from resilient.surface.bench.crew import postmaster, server_cpu
from resilient.surface.scratch import scratch

KEYS, BRANCHES = 10_000, 10
VARIANTS = ("plain", "by hand", "event", "unordered")


class Placed(Event, type="order.placed"):
    number: int


async def null(_message):
    pass


class Client:
    """One client: its statements, and how often it can do them."""

    def __init__(self, url, schema, number, *, asynchronous):
        self.app = Resilient(url, schema=schema, destinations={"null": null}, routes={Placed: ["null"]}, upgrade=False)
        options = {"pool_size": 1, "connect_args": {"options": f"-c search_path={schema}"}}

        self.asynchronous = asynchronous
        at = self.app.database.options()["url"]
        self.engine = (create_async_engine if asynchronous else sa.create_engine)(at, **options)
        self.dice = random.Random(number)
        self.hand = sa.text("INSERT INTO some_outbox (id, key, payload) VALUES (:id, :key, CAST(:payload AS json))")

    def small(self, n):
        return [
            (_INSERT, {"n": n, "note": "x" * 200}),
            (_UPDATE, {"n": n}),
        ]

    def tpcb(self, n):
        delta, b, t = (
            self.dice.randrange(-5000, 5000),
            self.dice.randrange(BRANCHES),
            self.dice.randrange(10 * BRANCHES),
        )
        all_ = {"a": n, "b": b, "t": t, "d": delta}
        return [(statement, {k: all_[k] for k in names}) for statement, names in _TPCB]

    def round(self, what, variant, seconds):
        """Returns how many transactions, and the CPU seconds of this process."""
        statements = getattr(self, what)
        if self.asynchronous:
            return asyncio.run(self._round_async(statements, variant, seconds))
        stop, done, cpu = time.monotonic() + seconds, 0, time.process_time()
        while time.monotonic() < stop:
            n = self.dice.randrange(KEYS)
            with Session(self.engine) as s:
                for statement, values in statements(n):
                    s.execute(statement, values)
                if variant == "by hand":
                    s.execute(self.hand, self.written(n))
                elif variant == "event":
                    self.app.outbox.publish(s, Placed(number=n), key=f"k{n}")
                elif variant == "unordered":
                    self.app.outbox.publish(s, Placed(number=n))
                s.commit()
            done += 1
        return done, time.process_time() - cpu

    async def _round_async(self, statements, variant, seconds):
        stop, done, cpu = time.monotonic() + seconds, 0, time.process_time()
        while time.monotonic() < stop:
            n = self.dice.randrange(KEYS)
            async with AsyncSession(self.engine) as s:
                for statement, values in statements(n):
                    await s.execute(statement, values)
                if variant == "by hand":
                    await s.execute(self.hand, self.written(n))
                elif variant == "event":
                    self.app.outbox.publish(s, Placed(number=n), key=f"k{n}")
                elif variant == "unordered":
                    self.app.outbox.publish(s, Placed(number=n))
                await s.commit()
            done += 1
        cpu = time.process_time() - cpu
        await self.engine.dispose()
        return done, cpu

    @staticmethod
    def written(n):
        return {"id": uuid4(), "key": f"k{n}", "payload": Placed(number=n).model_dump_json()}


_INSERT = sa.text("INSERT INTO placed (n, note) VALUES (:n, :note)")
_UPDATE = sa.text("UPDATE stock SET left_over = left_over - 1 WHERE n = :n")
_TPCB = [
    (sa.text("UPDATE accounts SET balance = balance + :d WHERE aid = :a"), ("d", "a")),
    (sa.text("SELECT balance FROM accounts WHERE aid = :a"), ("a",)),
    (sa.text("UPDATE tellers SET balance = balance + :d WHERE tid = :t"), ("d", "t")),
    (sa.text("UPDATE branches SET balance = balance + :d WHERE bid = :b"), ("d", "b")),
    (
        sa.text("INSERT INTO history (tid, bid, aid, delta, mtime) VALUES (:t, :b, :a, :d, CURRENT_TIMESTAMP)"),
        ("t", "b", "a", "d"),
    ),
]
TABLES = f"""
CREATE TABLE placed (id bigserial PRIMARY KEY, n int, note text);
CREATE TABLE stock (n int PRIMARY KEY, left_over int) WITH (fillfactor = 50);
INSERT INTO stock SELECT g, 0 FROM generate_series(0, {KEYS - 1}) g;
CREATE TABLE some_outbox (id uuid PRIMARY KEY, key text, payload json);
CREATE TABLE accounts (aid int PRIMARY KEY, balance int, filler char(84)) WITH (fillfactor = 50);
CREATE TABLE tellers (tid int PRIMARY KEY, balance int, filler char(84)) WITH (fillfactor = 10);
CREATE TABLE branches (bid int PRIMARY KEY, balance int, filler char(88)) WITH (fillfactor = 10);
CREATE TABLE history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
INSERT INTO accounts SELECT g, 0, '' FROM generate_series(0, {KEYS - 1}) g;
INSERT INTO tellers SELECT g, 0, '' FROM generate_series(0, {10 * BRANCHES - 1}) g;
INSERT INTO branches SELECT g, 0, '' FROM generate_series(0, {BRANCHES - 1}) g;
INSERT INTO resilient_order SELECT 'outbox/null', 'k' || g, 0, NULL, 1, now() FROM generate_series(0, {KEYS - 1}) g;
"""
EMPTY = (
    "TRUNCATE placed, history, some_outbox, resilient_job, resilient_turn",
    "UPDATE resilient_order SET head_id = NULL",
    "VACUUM (ANALYZE) resilient_order, stock, accounts, tellers, branches",
    "CHECKPOINT",
)


def client_process(pipe, url, schema, number, asynchronous):
    client = Client(url, schema, number, asynchronous=asynchronous)
    while (asked := pipe.recv()) is not None:
        pipe.send(client.round(*asked))


class Processes:
    """Clients that are processes."""

    def __init__(self, number, *arguments):
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for n in range(number):
            ours, theirs = spawn.Pipe()
            self.processes.append(spawn.Process(target=client_process, args=(theirs, *arguments[:2], n, arguments[2])))
            self.processes[-1].start()
            self.pipes.append(ours)

    def round(self, *asked):
        for pipe in self.pipes:
            pipe.send(asked)
        return [pipe.recv() for pipe in self.pipes]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join()


class Threads:
    """Clients that are threads of this process."""

    def __init__(self, number, url, schema, asynchronous):
        self.clients = [Client(url, schema, n, asynchronous=asynchronous) for n in range(number)]

    def round(self, *asked):
        found = []
        threads = [threading.Thread(target=lambda c=c: found.append(c.round(*asked))) for c in self.clients]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return found

    def close(self):
        for client in self.clients:
            client.app.database.close_sync()


def measure(options, place, what):
    """Rates, client CPU and server CPU by variant, a list with one figure a turn each."""
    found = {variant: ([], [], []) for variant in VARIANTS}
    with psycopg.connect(place.conninfo, autocommit=True, options=f"-c search_path={place.schema}") as c:
        server = postmaster(c)
        clients = (Threads if options.threads else Processes)(
            options.clients, place.url, place.schema, options.asynchronous
        )
        try:
            for variant in VARIANTS:
                clients.round(what, variant, 0.5)  # connections, plans, caches
            for turn in range(options.turns):
                for variant in VARIANTS[turn % 4 :] + VARIANTS[: turn % 4]:
                    for statement in EMPTY:
                        c.execute(statement)
                    before = server_cpu(server)
                    done = clients.round(what, variant, options.seconds)
                    after = server_cpu(server)
                    number = sum(n for n, _ in done)
                    rate, client, served = found[variant]
                    rate.append(number / options.seconds)
                    client.append(sum(cpu for _, cpu in done) / number * 1e6)
                    if before is not None and after is not None:
                        served.append((after - before) / number * 1e6)
        finally:
            clients.close()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", action="store_true", help="clients are threads of one process")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="with an AsyncSession")
    parser.add_argument("--transaction", choices=["small", "tpcb"], action="append")
    options = parser.parse_args()
    for what in options.transaction or ("small", "tpcb"):
        with scratch(options.url, "publish") as place:
            app = Resilient(place.url, schema=place.schema)
            upgrade_sync(app.database)
            app.database.close_sync()
            with psycopg.connect(place.conninfo, options=f"-c search_path={place.schema}") as c:
                c.execute(TABLES)
            found = measure(options, place, what)
        kind = "threads" if options.threads else "processes"
        title = {"small": "small transaction", "tpcb": "TPC-B-like transaction"}[what]
        print(f"{title}, {options.clients} {kind}{', AsyncSession' if options.asynchronous else ''}")
        for variant, (rate, client, served) in found.items():
            middle = statistics.median(rate)
            kept = statistics.median(mine / plain for mine, plain in zip(rate, found["plain"][0], strict=True))
            cpu = f"client CPU {statistics.median(client):4.0f} us"
            cpu += f", server CPU {statistics.median(served):4.0f} us" if served else ""
            print(f"  {variant:9}{middle:7,.0f}/s ({kept:4.0%}, {min(rate):,.0f} to {max(rate):,.0f}); {cpu}")


if __name__ == "__main__":
    main()
