"""Two versions of the code on one database, as a rolling update has them: today's, and that before the last migration.

The former is taken out of git: its workers begin on their own tables, go on while `db upgrade` brings the new ones, and
work beside today's until they are told to stop, one by one.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from resilient import Resilient
from tests.helpers import until

pytestmark = pytest.mark.proof("tests/store/test_migrations.py")

ROOT = Path(__file__).parents[2]
VERSIONS = Path("resilient/store/db/migrations/versions")
PROGRAM = """
import asyncio, os, sys
from resilient import Limit, Resilient, handler

def note(job):
    with open("done", "a") as file:
        file.write(f"{os.environ['SIDE']} {job.kind} {job.payload} {job.resource_key}\\n")

@handler("plain")
async def plain(job):
    await asyncio.sleep(0.01)
    note(job)

@handler("other")
def other(job):
    note(job)

app = Resilient(os.environ["DATABASE"], handlers=[plain, other], upgrade=False,
                limits={"slow/*": [Limit(200, per=1)]}, concurrency={"narrow/*": 1})

async def produce(first, number):
    async with app:
        for n in range(first, first + number):
            await app.enqueue(("plain", "other")[n % 2], n, resource_key=("crm", "slow", "narrow")[n % 3] + f"/{n % 4}")
            await app.enqueue("plain", n, resource_key=f"line/{n % 2}", ordering_key="one")
            await asyncio.sleep(0.01)

if __name__ == "__main__":
    asyncio.run(produce(int(sys.argv[1]), int(sys.argv[2])))
"""


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False).stdout


def former():
    """The commit before the last migration; none in a checkout without its history."""
    last = max(path.name for path in (ROOT / VERSIONS).glob("0*.py"))
    added = git("log", "-1", "--format=%H", "--diff-filter=A", "--", str(VERSIONS / last)).decode().strip()
    return git("rev-parse", "--verify", "--quiet", f"{added}^").decode().strip() if added else ""


@pytest.fixture(scope="module")
def previous(tmp_path_factory):
    """The code of that commit."""
    home = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(git("archive", former(), "resilient", "providers"))) as files:
        files.extractall(home, filter="data")
    return home


class Sides:
    """Processes of both versions, in one folder."""

    def __init__(self, folder, previous, url):
        self.folder, self.previous, self.url = folder, previous, url
        self.processes = []

    async def start(self, side, *words):
        environ = {**os.environ, "SIDE": side, "DATABASE": self.url}
        environ.pop("PYTHONPATH", None)
        if side == "old":
            environ["PYTHONPATH"] = str(self.previous)
        with (self.folder / f"{side}.log").open("a") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *words, cwd=self.folder, env=environ, stderr=log, stdout=log
            )
        self.processes.append(process)
        return process

    def command(self, side, *words):
        return self.start(side, "-m", "resilient.surface.cli", *words)

    def worker(self, side):
        return self.command(side, "--app", "side:app", "worker", "--concurrency", "4")

    def done(self):
        """How many executions each side has finished."""
        path = self.folder / "done"
        lines = path.read_text().splitlines() if path.exists() else []
        return collections.Counter(line.split()[0] for line in lines), [line.split(maxsplit=1)[1] for line in lines]

    def log(self, side):
        return (self.folder / f"{side}.log").read_text()


@pytest.fixture
async def sides(tmp_path, previous, empty_url):
    (tmp_path / "side.py").write_text(PROGRAM)
    sides = Sides(tmp_path, previous, empty_url)
    yield sides
    for process in sides.processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_both_versions_work_on_one_database_until_the_old_one_leaves(sides, open_database):
    assert await (await sides.command("old", "--database", sides.url, "db", "upgrade")).wait() == 0
    old = [await sides.worker("old") for _ in range(2)]
    early = await sides.start("old", "side.py", "0", "150")
    await until(lambda: sides.done()[0]["old"] > 20)
    assert await (await sides.command("new", "--database", sides.url, "db", "upgrade")).wait() == 0
    before = sides.done()[0]["old"]
    new = [await sides.worker("new") for _ in range(2)]
    late = await sides.start("new", "side.py", "1000", "150")
    await until(lambda: sides.done()[0]["old"] > before + 20)
    await until(lambda: sides.done()[0]["new"] > 20)
    for process in old:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0, sides.log("old")
    assert [await early.wait(), await late.wait()] == [0, 0], sides.log("old") + sides.log("new")
    app = Resilient(open_database(sides.url))
    await until(lambda: has_ended(app, 600))
    for process in new:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0, sides.log("new")
    assert await app.jobs.count(state="succeeded") == 600
    _, lines = sides.done()
    assert len(lines) == len(set(lines)) == 600, "each job was done, and once"
    for side in ("old", "new"):
        assert not {"Traceback", "ERROR"} & set(sides.log(side).split()), sides.log(side)
    await app.close()


async def has_ended(app, number):
    return await app.jobs.count(state=["succeeded", "dead", "cancelled"]) == number


# Where git has no former code, in a shallow clone say, there is nothing to run beside today's.
test_both_versions_work_on_one_database_until_the_old_one_leaves.__test__ = bool(former())
