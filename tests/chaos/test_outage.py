"""Somebody is told that the engine's database is silent or away, within seconds, and that it is back."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from proxy import Proxy
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from resilient import Job, Resilient, handler
from resilient.engine import alerts
from resilient.engine.run import heartbeat
from resilient.store.db import pool
from tests.helpers import until
from tests.serving import serving


@handler("nothing")
async def nothing(job: Job[None]) -> None:
    pass


def test_it_is_told_within_fifteen_seconds():
    assert heartbeat.LONGEST_BEAT + alerts.AWAY + heartbeat.TICK < 15
    assert pool.SUSPECT + pool.TICK + pool.CONNECT + pool.ANSWER < 15


def go_silent(proxy):
    proxy.hole = True


@pytest.fixture
def address(postgres_server, postgres_url):
    """A database behind a proxy."""
    name = postgres_url.partition("?")[0].rpartition("/")[2]
    with Proxy(next(postgres_server.data.glob(".s.PGSQL.*[0-9]"))) as proxy:
        yield proxy, f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}?sslmode=disable&gssencmode=disable"


@pytest.mark.parametrize("fail", [go_silent, Proxy.go_away], ids=["silent", "refusing"])
@pytest.mark.parametrize("when", ["at the start", "at work"])
async def test_every_sink_hears_once_of_an_outage_and_of_its_end(address, fail, when, monkeypatch, caplog):
    proxy, url = address
    monkeypatch.setattr(alerts, "AWAY", 1.0)
    monkeypatch.setattr(alerts, "STEADY", 0.5)
    plain, coroutine, posted = [], [], []
    caplog.set_level(logging.INFO, "resilient.alerts")

    async def hear(notice):
        coroutine.append(notice)

    async def take(request):
        posted.append(json.loads(await request.body()))
        return Response()

    async with serving(Starlette(routes=[Route("/hook", take, methods=["POST"])])) as hook:
        app = Resilient(url, handlers=[nothing], upgrade=False, alerts=[plain.append, hear, f"{hook}/hook"])
        app.database.watch.suspect = 0.5
        worker = app.worker(concurrency=1, lease=4.0)
        if when == "at the start":
            fail(proxy)
        running = asyncio.create_task(worker.run(signals=False))
        if when == "at work":
            await app.enqueue(nothing, resource_key="k/1")
            await until(lambda: worker.executions)
            fail(proxy)
        await until(lambda: plain and coroutine and posted)
        proxy.away = proxy.hole = False
        await until(lambda: len(plain) + len(coroutine) + len(posted) >= 6)
        worker.stop()
        await running
        await app.close()
    told = [[(one.state, one.alert.name) for one in heard] for heard in (plain, coroutine)]
    told.append([(one["state"], one["alert"]["name"]) for one in posted])
    assert told == [[("new", "database_unreachable"), ("resolved", "database_unreachable")]] * 3
    assert "postgresql://postgres@127.0.0.1" in plain[0].text
    assert caplog.text.count("database_unreachable: ") == 2
