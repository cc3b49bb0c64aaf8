"""What `pip install resilient-engine` brings, without an extra, is enough for a program on SQLite."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROGRAM = """
import asyncio, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())

from sqlalchemy import text
from resilient import Job, Provider, Resilient, SyncJob, handler

@handler("coroutine", mode="atomic")
async def coroutine(job: Job) -> None:
    async with job.complete() as session:
        await session.execute(text("INSERT INTO done VALUES ('coroutine')"))

@handler("plain", mode="atomic")
def plain(job: SyncJob) -> None:
    with job.complete() as session:
        session.execute(text("INSERT INTO done VALUES ('plain')"))

crm = Provider(name="crm", base_url="https://api.crm.example")

async def main():
    async with Resilient("sqlite:///app.db", handlers=[coroutine, plain], providers=[crm]) as app:
        await app.enqueue(coroutine, resource_key="crm/acct-7")
        await app.enqueue(plain, resource_key="crm/acct-7")
        await app.worker().drain()
        print(sorted(f'{one.kind} {one.state.value}' for one in await app.jobs.list()))

asyncio.run(main())
"""


def _name(text):
    return re.sub(r"[-_.]+", "-", text).lower()


def _brought():
    """The distributions that the engine brings without an extra, and theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, found = [Requirement(one) for one in project["dependencies"]], set()
    while waiting:
        one = waiting.pop()
        if one.marker is not None and not any(one.marker.evaluate({"extra": e}) for e in {"", *one.extras}):
            continue
        mark = (_name(one.name), frozenset(one.extras))
        if mark in found:
            continue
        found.add(mark)
        try:
            theirs = [Requirement(text) for text in requires(one.name) or ()]
        except PackageNotFoundError:  # for another system or another Python
            continue
        for two in theirs:
            if two.marker is None or any(two.marker.evaluate({"extra": e}) for e in {"", *one.extras}):
                two.marker = None
                waiting.append(two)
    return {name for name, _ in found}


def test_coroutines_and_plain_handlers_write_on_sqlite_without_an_extra(tmp_path):
    brought = _brought() | {"resilient-engine"}
    absent = {
        module for module, homes in packages_distributions().items() if not {_name(home) for home in homes} & brought
    }
    assert {"psycopg", "starlette", "pytest"} <= absent
    assert not {"sqlmodel", "greenlet", "httpx", "rich"} & absent
    make = "import sqlite3; sqlite3.connect('app.db').execute('CREATE TABLE done (what TEXT)')"
    subprocess.run([sys.executable, "-c", make], check=True, cwd=tmp_path)
    program = [sys.executable, "-c", f"ABSENT = {absent!r}\n{PROGRAM}"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "['coroutine succeeded', 'plain succeeded']", done.stderr[-2000:]
