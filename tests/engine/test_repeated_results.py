"""Results of two executions of one job that wait to be written together: this process slept through its lease."""

from __future__ import annotations

import asyncio

import pytest

from resilient import Job, Resilient, handler
from resilient.core.jobs.outcomes import SUCCEEDED, Transition
from resilient.engine.run import completer
from resilient.engine.run.completer import Completer
from resilient.engine.run.execution import Execution
from resilient.store.db.dialect import ID
from resilient.store.jobs.finishing import Finish
from tests.helpers import LIMIT


@handler("work")
async def work(job: Job[None]) -> None: ...


@pytest.fixture
async def app(empty_urls):
    app = Resilient(empty_urls(), handlers=[work], upgrade=True)
    yield app
    await app.close()


def failed(id_, version, error):
    return Finish(id_, version, Transition("dead", "dead", error=error, error_kind="bug"))


async def completed(app, results):
    """Write these results in one batch, beside that of another job: what was written of both, and the counts."""
    rows = await app.database.transaction(
        lambda c, d: d.run(
            c, "UPDATE {job} SET state = 'running', version = version + 2 RETURNING id, version, resource_key", id=ID
        ).all()
    )
    first, other = sorted(rows, key=lambda row: row.resource_key)
    completer = Completer(app.database, lambda _: (), lambda *_: None, lambda *_: None, app.poke, roll=lambda: 0.0)
    for what, fence in zip(results, (first.version - 2, first.version), strict=True):
        if what == "succeeds":
            completer.succeed(first.id, fence, f'"{fence}"', first.resource_key)
        else:
            completer.finish(failed(first.id, fence, f"at fence {fence}"), first.resource_key)
    completer.succeed(other.id, other.version, None, other.resource_key)
    await completer.start()
    async with asyncio.timeout(LIMIT):
        await completer.close()
    return completer, await app.jobs.get(first.id), await app.jobs.get(other.id), first.version


@pytest.mark.parametrize("results", [(a, b) for a in ("succeeds", "fails") for b in ("succeeds", "fails")])
async def test_the_later_one_counts_and_nothing_waits(app, results, caplog):
    for n in (1, 2):
        await app.enqueue(work, resource_key=f"p/{n}")
    completer, first, other, version = await completed(app, results)
    assert other.state == "succeeded"
    assert (first.state, first.result, first.last_error) == (
        ("succeeded", str(version), None) if results[1] == "succeeds" else ("dead", None, f"at fence {version}")
    )
    assert (completer.written, completer.stale) == (2, 1)
    assert "1 results changed nothing" in caplog.text
    assert f"(first: job {first.id})" in caplog.text
    assert "cannot save" not in caplog.text


async def test_the_lease_of_the_later_one_is_kept_until_it_is_written(app, monkeypatch):
    """What the earlier one came to is written first, and changes nothing."""
    await app.enqueue(work, resource_key="p/1")
    worker = app.worker()
    async with worker._services(background=False):
        while (claimed := (await worker._claim(1))[0]) is None or not claimed.jobs:
            pass  # the first look makes the resource's row
        (row,) = claimed.jobs
        again = row._replace(version=row.version + 2)
        earlier, later = (Execution(worker.context, each, work, ()) for each in (row, again))
        await app.database.transaction(lambda c, d: d.run(c, "UPDATE {job} SET version = version + 2"))
        held, real = [], completer.write

        def write(c, d, done, *args, **options):
            """As the database would be away once the first of them is written."""
            if [one for one in done if one[1] == later.fence] and not held:
                held.append(worker.fences())
                raise OSError("the database is away")
            return real(c, d, done, *args, **options)

        monkeypatch.setattr(completer, "write", write)
        monkeypatch.setattr(completer, "retry_pause", lambda *_: 0.0)
        for one in (earlier, later):
            worker.finisher.conclude(one, SUCCEEDED)
        async with asyncio.timeout(LIMIT):
            await worker.completer.flushed()
    assert held == [[(row.id, later.fence)]]
    assert worker.fences() == []
    assert (await app.jobs.get(row.id)).state == "succeeded"
