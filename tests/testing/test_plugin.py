"""The pytest plugin, as a user's own test run has it."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

USES = """
from resilient import Job, Retry, handler

@handler("get", retry=Retry(max_attempts=5))
async def get(job: Job[None]) -> None:
    (await job.client.get("/x")).raise_for_status()

async def test_waits_as_long_as_it_is_told(fake_provider, resilient_app, drain, fake_clock):
    fake = fake_provider("hubspot")
    fake.on("*", {})
    fake.throttle(for_=600)
    app = resilient_app(handlers=[get], providers=[fake.provider])
    await app.connections.import_("hubspot/a", **fake.account("a").tokens)
    await app.enqueue(get, resource_key="hubspot/a")
    before = fake_clock.now()
    assert await drain(app) == 1
    assert await drain(app, hours=1) == 1
    assert (fake_clock.now() - before).total_seconds() == 3600
    assert [one.status for one in fake.log.api] == [429, 200]
    assert fake.early == 0

def test_without_a_loop(resilient_app, drain_sync):
    app = resilient_app(handlers=[get])
    app.enqueue_sync(get, resource_key="nobody/a", delay=60)
    assert drain_sync(app) == 0
"""


def test_its_fixtures(pytester):
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makepyfile(USES)
    ran = pytester.runpytest_subprocess("-W", "error")
    ran.assert_outcomes(passed=2)


def test_who_does_not_use_it_does_not_pay_for_it():
    script = "import resilient.testing.plugin, sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"sqlalchemy", "httpx", "pydantic", "authlib"} & set(ran.stdout.split())


def test_it_is_installed_with_the_package():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"resilient": "resilient.testing.plugin"}


async def test_drain_does_what_a_worker_does_beside_its_jobs(resilient_app, drain):
    from resilient import Alerting, Job, Schedule, handler

    ran, notices = [], []

    @handler("hourly")
    async def hourly(job: Job[None]) -> None:
        ran.append(job.tags["tick"])

    @handler("never")
    async def never(job: Job[None]) -> None: ...

    schedules = [Schedule(hourly, every="1h", resource_key="a/b"), Schedule(never, every="1h", resource_key="a/off")]
    app = resilient_app(handlers=[hourly, never], schedules=schedules, alerts=Alerting(sinks=[notices.append]))
    await drain(app)
    await app.resources.pause("a/off", reason="off")
    assert await drain(app, hours=10) == 10
    assert len(set(ran)) == 10
    await app.alerts._sinks.finish()
    assert {(one.alert.name, one.alert.subject) for one in notices} == {("no_success", "never@a/off")}


async def test_a_worker_that_ended_says_so_instead_of_waiting_for_ever(sqlite_url):
    from resilient import Job, Resilient, SetupError, handler

    @handler("nothing")
    async def nothing(job: Job[None]) -> None:
        pass

    app = Resilient(sqlite_url, handlers=[nothing], upgrade=False)
    worker = app.worker()
    await worker.drain()
    with pytest.raises(SetupError, match="make another"):
        await worker.drain()
    await app.close()
