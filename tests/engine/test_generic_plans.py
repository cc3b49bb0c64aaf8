"""`Resilient(generic_plans=False)`: no statement of the engine's sets plan_cache_mode, as the server's own log says."""

from __future__ import annotations

import pytest

from resilient import Job, Resilient, Schedule, handler
from tests.helpers import LIMIT


@handler("work")
async def work(job: Job[int]) -> None:
    if job.payload == 3:
        raise ValueError("no")
    job.then("plain", 1, resource_key=job.resource_key)


@handler("plain")
def plain(job: Job[int]) -> None:
    pass


async def live(url, **options):
    """A worker's life: many jobs and one, by session and without, with housekeeping."""
    app = Resilient(
        url, handlers=[work, plain], schedules=[Schedule(plain, 1, every="1h", resource_key="a/s")],
        upgrade=True, **options,
    )  # fmt: skip
    await app.enqueue_many(plain, range(50), resource_key="a/many")
    for n in range(9):
        await app.enqueue(work, n, resource_key=f"a/{n % 3}", ordering_key="o" if n % 2 else None)
    app.sync.enqueue(plain, 1, resource_key="b/1")
    worker = app.worker(concurrency=4)
    await worker.drain(timeout=LIMIT)
    await app.alerts.keep_house()
    await app.resources.pause("a/1", reason="test")
    await app.resources.resume("a/1")
    await app.jobs.list()
    await app.close()


@pytest.mark.parametrize("generic", [True, False])
async def test_what_is_sent_to_the_server(own_postgres, generic):
    name = own_postgres.create()
    with own_postgres.connect() as c:
        c.execute("ALTER SYSTEM SET log_statement = 'all'")
        c.execute("SELECT pg_reload_conf()")
        while c.execute("SHOW log_statement").fetchone() != ("all",):
            pass
    await live(own_postgres.url(name), generic_plans=generic)
    statements = (own_postgres.data / "log").read_text()
    assert statements.count("enable_hashjoin") > 5, "claims and finishes are in the log"
    assert ("plan_cache_mode" in statements) is generic
