"""The figures about many accounts and many processes, in small, counted by a provider."""

import asyncio
import json
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

import pytest
import sqlalchemy as sa

from resilient import Job, Resilient, handler
from tests import nursery

pytestmark = pytest.mark.proof("test_sync.py, test_gate.py and tests/store/test_resources_races.py")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


async def figures(script, *arguments, patience=200):
    """What a benchmark prints."""
    with tempfile.TemporaryFile("w+") as errors:
        child = nursery.start(BENCHMARKS / script, *arguments, stdout=PIPE, stderr=errors)
        try:
            out, _ = await asyncio.wait_for(asyncio.to_thread(child.communicate), patience)
        finally:
            child.kill()
        errors.seek(0)
        assert child.returncode == 0, errors.read()[-2000:]
    return json.loads(out)


@handler("ours")
async def ours(job: Job[None]) -> None:
    """Of somebody who uses the database for something else."""


def around(app):
    """What else there is where the database is: schemas, or files of the folder."""
    if app.database.is_sqlite:
        return sorted(path.name for path in Path(app.database.url.database).parent.iterdir())
    return sorted(sa.inspect(app.database.sync_engine).get_schema_names())


@asynccontextmanager
async def undisturbed(url):
    """The database holds a job, and nothing else afterwards."""
    async with Resilient(url, handlers=[ours], upgrade=False) as app:
        await app.enqueue(ours, resource_key="p/1")
        before = around(app)
        yield
        assert around(app) == before
        assert [job.kind for job in await app.jobs.list()] == ["ours"]


@pytest.mark.parametrize(("url", "how"), [("sqlite_url", "503"), ("postgres_url", "reset")])
async def test_an_outage_of_a_hundred_accounts(request, url, how):
    url = request.getfixturevalue(url)
    async with undisturbed(url):
        found = await figures(
            "bench_outage.py", "--database", url, "--how", how, "--accounts", 100, "--down", 4,
            "--concurrency", 10, "--first-open", 1, "--ramp", 2, "--patience", 80,
        )  # fmt: skip
    assert (found["lost"], found["repeated"], found["clean_exits"]) == (0, 0, 2)
    assert found["until_stopped"] + found["probes"] <= 60  # of two processes with 20 slots, and 200 jobs that wait
    assert all(many <= max(3, 2 << (tenth + 1)) for tenth, many in enumerate(found["peak"])), found  # no herd


async def test_a_limit_shared_by_processes(sqlite_url):
    limit = ("--rate", 40, "--per", 2, "--seconds", 4, "--workers", 3)  # the benchmark's own default is eight
    async with undisturbed(sqlite_url):
        found = await figures("bench_limits.py", "--database", sqlite_url, *limit)
    assert (found["lost"], found["repeated"]) == (0, 0)
    assert found["most"] <= 44  # a busy machine may hold up what was sent; each of them alone may send 40


@pytest.mark.parametrize("url", ["sqlite_url", "postgres_url"])
async def test_a_sync_whose_process_is_killed(request, url):
    url = request.getfixturevalue(url)
    async with undisturbed(url):
        found = await figures(
            "bench_sync.py", "--database", url, "--records", 300, "--page", 10, "--rate", 100, "--kills", 1
        )
    assert (found["missing"], found["doubled"], found["kills"], found["state"]) == (0, 0, 1, "succeeded")
