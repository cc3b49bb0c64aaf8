"""Every figure of a chaos run (a killed worker, failures, retries) is what the database and the provider say.

What a killed process counted is gone with it, so its figures are those of the others: each is compared alone.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from resilient import Item, Kind, Resilient
from resilient.store.inspect.throughput import throughput
from tests.helpers import LIMIT, until
from tests.serving import serving

JOBS, ACCOUNTS, WORKERS, FEW = 300, 20, 3, 5
PROGRAM = """
import os
from resilient import BreakerPolicy, Fixed, Limit, Resilient, Retry, handler

@handler("push", retry=Retry(max_attempts=5, delay=Fixed(0.1)))
async def push(job):
    answer = await job.client.get(f"{address}/{{job.payload}}", headers={{"x-pid": str(os.getpid())}})
    answer.raise_for_status()
    return os.getpid()

app = Resilient({url!r}, handlers=[push], limits={{"crm/*": [Limit(10000, per=1)]}},
                breakers={{"crm/**": BreakerPolicy(streak=1000), "crm": BreakerPolicy(streak=1000)}})
"""
pytestmark = pytest.mark.chaos


class Provider:
    """Answers 200, 404 to every tenth job, 409 to every seventh the first time; knows who asked.

    The ``victim`` gets no more answers after the first few, so that it has jobs when it is killed.
    """

    def __init__(self):
        self.answers = Counter()  # by pid and status
        self.victim, self.waiting, self.over = 0, 0, asyncio.Event()
        self._tried = set()

    async def __call__(self, scope, _receive, send):
        number = int(scope["path"].rpartition("/")[2])
        pid = int(dict(scope["headers"])[b"x-pid"])
        status = 404 if number % 10 == 0 else 409 if number % 7 == 0 and number not in self._tried else 200
        self._tried.add(number)
        await asyncio.sleep(0.02)
        if pid == self.victim and sum(n for (one, _), n in self.answers.items() if one == pid) >= FEW:
            self.waiting += 1
            await self.over.wait()
            return
        self.answers[pid, status] += 1
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Process:
    """A worker process with its endpoint."""

    @classmethod
    async def start(cls, folder):
        self = cls()
        command = [sys.executable, "-m", "resilient.surface.cli", "--app", "program:app", "worker", "--metrics", "0"]
        self.process = await asyncio.create_subprocess_exec(
            *command, "--concurrency", "6", "--lease", "2", cwd=folder, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(LIMIT):
            async for line in self.process.stderr:
                if found := re.search(r"/metrics at (http://\S+)", line.decode()):
                    self.url = found[1]
                    break
        self.pid = self.process.pid
        self.reading = asyncio.create_task(self.process.stderr.read())  # or its pipe is full some day
        return self

    async def scrape(self):
        """Samples by name and labels."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{self.url}/metrics", timeout=30)).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def end(self):
        if self.process.returncode is None:
            self.process.terminate()
        async with asyncio.timeout(LIMIT):
            await self.process.wait()


def total(samples, name, by=None, **labels):
    """The sum of a metric's series with these labels, or the sums by the values of one label."""
    sums = Counter()
    for (sample, pairs), value in samples.items():
        values = dict(pairs)
        if sample == name and labels.items() <= values.items():
            sums[values.get(by)] += int(value)
    return +sums if by else sums[None]


async def rows(app, sql):
    return await app.database.transaction(lambda c, d: [tuple(row) for row in d.run(c, sql).all()])


async def test_every_figure_is_the_databases(postgres_url, tmp_path):
    provider, app = Provider(), Resilient(postgres_url, kinds=[Kind("push")])
    async with serving(provider) as address:
        (tmp_path / "program.py").write_text(PROGRAM.format(address=address, url=postgres_url))
        processes = await asyncio.gather(*(Process.start(tmp_path) for _ in range(WORKERS)))
        try:
            await compare(app, provider, *processes)
        finally:
            for one in processes:
                await one.end()
            await app.close()


async def compare(app, provider, killed, *survivors):
    await until(lambda: has_workers(app))
    provider.victim = killed.pid
    await app.enqueue_many("push", [Item(n, resource_key=f"crm/{n % ACCOUNTS}") for n in range(JOBS)])
    await until(lambda: provider.waiting)
    killed.process.kill()
    await killed.process.wait()
    provider.over.set()
    await until(lambda: is_over(app))
    scrapes = {one.pid: await one.scrape() for one in survivors}

    history = Counter(await rows(app, "SELECT worker_id, decision FROM {attempt}"))
    succeeded = Counter(pid for (pid,) in await rows(app, "SELECT result FROM {job} WHERE state = 'succeeded'"))
    transient = "SELECT worker_id FROM {attempt} WHERE kind = 'transient' AND decision <> 'rescued'"
    unanswered_by = Counter(int(id_.split(":")[1]) for (id_,) in await rows(app, transient))
    rescued = sum(n for (_, decision), n in history.items() if decision == "rescued")
    assert rescued > 0
    assert {decision for _, decision in history} >= {"dead", "retry", "rescued"}, "there was something to count"
    for pid, samples in scrapes.items():
        of_it = {decision: n for (id_, decision), n in history.items() if f":{pid}:" in id_ and decision != "rescued"}
        truth = Counter(of_it) + Counter(succeeded=succeeded[pid])
        outcomes = total(samples, "resilient_executions_total", by="outcome", kind="push", provider="crm")
        assert outcomes - Counter(rescued=outcomes["rescued"]) == truth
        ended = total(samples, "resilient_execution_duration_seconds_count", kind="push")
        assert ended == truth.total() + total(samples, "resilient_fenced_results_total")
        answers = {status: provider.answers[pid, status] for status in (200, 404, 409)}
        requests = total(samples, "resilient_requests_total", by="outcome", provider="crm", method="GET")
        unanswered = unanswered_by[pid]  # where the machine stood still for a timeout
        assert requests == Counter(
            ok=answers[200],
            permanent=answers[404],
            conflict=answers[409],
            **{"transient": unanswered} if unanswered else {},
        )
        assert total(samples, "resilient_request_duration_seconds_count", provider="crm") == sum(answers.values())
        assert total(samples, "resilient_executions_running") == 0
    assert sum(total(samples, "resilient_rescues_total") for samples in scrapes.values()) == rescued

    (gauges,) = (samples for samples in scrapes.values() if total(samples, "resilient_exporter"))
    dead = Counter(state for (state,) in await rows(app, "SELECT state FROM {job}"))["dead"]
    assert dead == JOBS // 10
    assert total(gauges, "resilient_jobs", by="state") == {"dead": dead}
    assert total(gauges, "resilient_jobs_runnable") == 0
    (alive,) = await rows(app, "SELECT count(*) FROM {worker}")
    assert total(gauges, "resilient_workers") == alive[0]

    for one in survivors:
        await one.end()
    sums = Counter({(w, o): n for w, o, n in await rows(app, "SELECT worker, outcome, sum(count) FROM {throughput}"
                                                            " GROUP BY worker, outcome")})  # fmt: skip
    for pid, samples in scrapes.items():
        by_minute = {outcome: int(n) for (worker, outcome), n in sums.items() if f":{pid}:" in worker}
        assert by_minute == total(samples, "resilient_executions_total", by="outcome")
    charted = sum(one.count for one in await app.database.transaction(throughput) if one.outcome == "succeeded")
    lost = sum(succeeded.values()) - charted
    assert 0 <= lost <= succeeded[killed.pid], "at most what the killed one had done since its last beat"


async def has_workers(app):
    return (await rows(app, "SELECT count(*) FROM {worker}"))[0][0] == WORKERS


async def is_over(app):
    return not await rows(app, "SELECT 1 FROM {job} WHERE finished_at IS NULL LIMIT 1")
