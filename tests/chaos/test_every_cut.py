"""Every promise, cut at every commit: the program dies before or after it, or the line breaks and it lives.

RESILIENT_CUTS=all: every mode at every commit of every shape, on both databases; else a part of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib

import pytest
from cut_features import FEATURES
from cut_shapes import JOBS
from cut_world import Ground, Place, World, run
from knife import CUTS, DEATHS, Knife, KnifeProxy, knives_in_sqlite

from resilient.store.db.database import Database
from tests import invariants
from tests.conftest import FakeClock
from tests.serving import Server

MODES = (*DEATHS, *CUTS)
DULL = {"resilient_turn", "resilient_resource", "resilient_worker", "resilient_throughput", "SET"}
IS_ALL = os.environ.get("RESILIENT_CUTS") == "all"
TABLE = "CREATE TABLE mine (id {} PRIMARY KEY, name TEXT)"


@pytest.fixture(scope="module")
def place():
    place = Place()
    with Server(place) as place.url:
        yield place


def _extended(url):
    database = Database(url)
    with database.sync_engine.begin() as c:
        c.exec_driver_sql(TABLE.format("INTEGER" if database.is_sqlite else "serial"))
        invariants.install(c.connection.driver_connection)
    database.close_sync()


@pytest.fixture(scope="module")
def grounds(tmp_path_factory, postgres_server, _postgres_template, _sqlite_template):
    """``grounds(backend, knife)``: a context manager of one case's database."""
    folder = tmp_path_factory.mktemp("cuts")
    file = shutil.copy(_sqlite_template, folder / "template.db")
    _extended(f"sqlite:///{file}")
    template = postgres_server.create(_postgres_template)
    _extended(postgres_server.url(template))

    @contextlib.contextmanager
    def ground(backend, knife):
        if backend == "sqlite":
            path = shutil.copy(file, folder / "case.db")
            yield Ground(f"sqlite:///{path}", f"sqlite:///{path}"), knives_in_sqlite(knife)
            for one in folder.glob("case.db*"):
                one.unlink()
            return
        name = postgres_server.create(template)
        proxy.knife = knife
        yield Ground(proxy.url(name), postgres_server.url(name)), contextlib.nullcontext()
        postgres_server.drop_soon(name)

    with KnifeProxy(next(postgres_server.data.glob(".s.PGSQL.*[0-9]"))) as proxy:
        yield ground


async def cut(shape, backend, number, mode, place, grounds, ends=None):
    """One case; its knife and what is broken."""
    knife = Knife(number, mode)
    world = place.world = World(knife, FakeClock())
    world.url = place.url
    with grounds(backend, knife) as (ground, cutting):
        broken = await run(shape, world, ground, knife, cutting, ends)
    return knife, world, broken


def cases(shape, backend, commits):
    """Commits, and what happens there. Of those that only serve turns PostgreSQL's are left out: they are SQLite's."""
    worth = [n for n, about in enumerate(commits, 1) if not DULL.issuperset(about.split())]
    if IS_ALL:
        return [(n, mode) for n in (worth if backend == "postgresql" else range(1, len(commits) + 1)) for mode in MODES]
    spread = zlib.crc32(shape.name.encode())  # each commit in one mode, on one database, others in other shapes
    chosen = [(n, MODES[(n + spread) % len(MODES)]) for n in worth]
    return [one for one in chosen if (one[0] + spread) % 4 == 0] if backend == "postgresql" else chosen


@pytest.mark.parametrize("shape", [*JOBS, *FEATURES], ids=lambda shape: shape.name)
@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
async def test_cut_anywhere_it_keeps_its_promise(shape, backend, place, grounds):
    knife, calm, broken = await cut(shape, backend, 0, "die before", place, grounds)
    assert broken == []
    found = []
    for number, mode in cases(shape, backend, knife.commits):
        knife, _, broken = await cut(shape, backend, number, mode, place, grounds, calm.ends)
        about = "".join(knife.commits[number - 1 : number])
        found += [f"{mode} {number} ({about}): {one}" for one in broken]
    assert found == []
