"""How long each page of the dashboard takes, and how many rows it shows: 100,000 accounts, 1,000,000 jobs.

    python -m tests.benchmarks.bench_dashboard --database sqlite:////tmp/bench.db [--accounts 100000] [--jobs 1000000]

The database must be empty. A tenth of the accounts is stopped, by three gates; 2 of 100 jobs are dead; two days of
throughput have a row for each minute, 5 kinds, 10 providers and 3 outcomes. Prints for each
page the median and the worst of some requests, in milliseconds, its size and its rows. Each request is the first for
ten seconds; the very first of a process, which reads all of the throughput, is not among them.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from datetime import UTC, datetime

import httpx

from resilient import Resilient, web
from resilient.surface.web.dashboard import charts

PAGES = (
    "/", "/accounts", "/accounts?all=1", "/accounts?q=p1&gate=pause", "/accounts?q=p2/acct-5*", "/account/p1/acct-5",
    "/account/p1", "/jobs", "/jobs?state=ready&resource=p3/*", "/jobs?state=dead", "/dead", "/workflows", "/schedules",
    "/streams", "/outbox", "/connections", "/workers", "/audit", "/enqueue",
)  # fmt: skip
_RESOURCES = (
    "INSERT INTO resilient_resource (key, created_at, updated_at, breaker, open_until, opened_at, paused_at,"
    " blocked_until, blocked_since, blocked_code)"
    " SELECT 'p' || (n % 10) || '/acct-' || n, {now}, {now}, CASE WHEN n % 30 = 1 THEN 'open' ELSE 'closed' END,"
    " CASE WHEN n % 30 = 1 THEN {far} END, CASE WHEN n % 30 = 1 THEN {now} END, CASE WHEN n % 30 = 2 THEN {now} END,"
    " CASE WHEN n % 30 = 3 THEN {far} END, CASE WHEN n % 30 = 3 THEN {now} END,"
    " CASE WHEN n % 30 = 3 THEN 'http_429' END FROM {series}"
)
_JOBS = (
    "INSERT INTO resilient_job (id, kind, resource_key, payload, state, run_at, created_at, updated_at, finished_at,"
    " last_error_kind, last_error_code, last_error) SELECT {id}, 'kind.' || (n % 5),"
    " 'p' || (n % {accounts} % 10) || '/acct-' || (n % {accounts}), {payload},"
    " CASE WHEN n % 100 < 2 THEN 'dead' WHEN n % 100 < 50 THEN 'succeeded' ELSE 'ready' END, {now}, {now}, {now},"
    " CASE WHEN n % 100 < 50 THEN {now} END, CASE WHEN n % 100 < 2 THEN 'permanent' END,"
    " CASE WHEN n % 100 < 2 THEN 'http_422' END, CASE WHEN n % 100 < 2 THEN 'no such contact' END FROM {series}"
)
_THROUGHPUT = (
    "INSERT INTO resilient_throughput (minute, worker, kind, provider, outcome, count)"
    " SELECT {minute} - n / 150, '', 'kind.' || (n % 5), 'p' || (n / 5 % 10),"
    " CASE n / 50 % 3 WHEN 0 THEN 'succeeded' WHEN 1 THEN 'retry' ELSE 'dead' END, 1 + n % 7 FROM {series}"
)
_MINUTES = 48 * 60


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fill(c, d, accounts, jobs):
    """Rows by the database's own means."""
    at = datetime.now(UTC)
    for template, number in ((_RESOURCES, accounts), (_JOBS, jobs), (_THROUGHPUT, _MINUTES * 150)):
        if d.is_postgresql:
            words = {
                "now": f"timestamptz '{at.isoformat()}'", "far": "timestamptz '2099-01-01 00:00:00+00'",
                "series": f"generate_series(0, {number - 1}) AS n", "id": "md5('job' || n)::uuid", "payload": "'{}'",
            }  # fmt: skip
        else:
            words = {
                "now": f"'{at:%Y-%m-%d %H:%M:%S.%f}'", "far": "'2099-01-01 00:00:00.000000'",
                "series": (
                    f"(WITH RECURSIVE s(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < {number - 1})"
                    " SELECT n FROM s)"
                ),
                "id": "lower(printf('%032x', n))", "payload": "'{}'",
            }  # fmt: skip
        text = template.format(**words, accounts=accounts, minute=int(at.timestamp()) // 60)
        c.exec_driver_sql(text.replace("%", "%%") if d.is_postgresql else text)
    if d.is_postgresql:
        c.exec_driver_sql("ANALYZE")


async def measure(url, accounts, jobs, rounds):
    app = Resilient(url, upgrade=True)
    await app.ready()
    began = time.perf_counter()
    await app.database.transaction(fill, accounts, jobs)
    say(f"{accounts:,} accounts, {jobs:,} jobs: filled in {time.perf_counter() - began:.0f} s")
    who = web.Operator("bench", ["read", "payloads", "jobs", "resources", "connections"])
    transport = httpx.ASGITransport(web.dashboard(app, operator=lambda _request: who))
    async with httpx.AsyncClient(transport=transport, base_url="http://bench.test", timeout=120) as client:
        say(f"{'page':32} {'median ms':>10} {'worst ms':>10} {'KiB':>6} {'rows':>5}")
        for page in PAGES:
            await client.get(page)  # templates and connections
            took = []
            for _ in range(rounds):
                for known in charts.RECENT.values():
                    known.read_at = -charts.FRESH  # a page after ten seconds
                began = time.perf_counter()
                answer = await client.get(page)
                took.append((time.perf_counter() - began) * 1000)
            rows = len(re.findall(r"<tr |<article ", answer.text))
            size = len(answer.content) / 1024
            assert answer.status_code == 200, (page, answer.status_code)
            say(f"{page:32} {statistics.median(took):10.0f} {max(took):10.0f} {size:6.0f} {rows:5}")
    await app.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", required=True)
    parser.add_argument("--accounts", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(options.database, options.accounts, options.jobs, options.rounds))


if __name__ == "__main__":
    main()
