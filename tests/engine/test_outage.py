"""The engine's database away is told without it: once an outage by each process, and at its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest

from resilient import Alerting, DatabaseUnreachable, Job, Resilient, handler
from resilient.engine.alerts import AWAY, STEADY
from resilient.engine.ground.counts import Counts
from resilient.engine.run import heartbeat
from resilient.engine.run.heartbeat import DatabaseLink, Heartbeat
from tests.helpers import until


@handler("nothing")
async def nothing(job: Job[None]) -> None:
    pass


@pytest.fixture
async def app(database, clock):
    told = []
    app = Resilient(database, handlers=[nothing], upgrade=False, alerts=[told.append])
    app.told = told
    yield app
    await app.close()


@pytest.fixture
def outage(app):
    return app.alerts.outage


async def news(app):
    await app.alerts._sinks.finish()
    found = [(notice.state, notice.alert.name) for notice in app.told]
    app.told.clear()
    return found


BEGUN, OVER = ("new", "database_unreachable"), ("resolved", "database_unreachable")


async def test_once_and_at_its_end(app, outage, clock):
    began = clock.now() - timedelta(seconds=AWAY)
    for seconds in range(60):
        outage.unanswered("w", AWAY - 1 + seconds, "connection refused")
    notice = await latest(app)
    assert (notice.alert.first_at, notice.alert.subject) == (began, app.database.address)
    assert notice.text.endswith("connection refused")
    assert await news(app) == [BEGUN]
    clock.advance(600)
    for at in range(int(STEADY) + 10):
        outage.answered("w", 100.0 + at)
    notice = await latest(app)
    assert notice.alert.resolved_at == clock.now() - timedelta(seconds=STEADY)
    assert notice.text.startswith("resolved after ")
    assert await news(app) == [OVER]


async def latest(app):
    await app.alerts._sinks.finish()
    return app.told[-1]


async def test_a_short_one_is_not_told(app, outage):
    for n in range(100):
        outage.unanswered("w", AWAY - 0.1, "cut")
        outage.answered("w", float(n))
    assert await news(app) == []


async def test_one_that_comes_and_goes_is_one(app, outage):
    outage.unanswered("w", AWAY)
    for n in range(20):
        outage.answered("w", 40.0 * n)
        outage.answered("w", 40.0 * n + STEADY - 1)
        outage.unanswered("w", 1.0, "cut")
    assert await news(app) == [BEGUN]
    outage.answered("w", 1000.0)
    outage.answered("w", 1000.0 + STEADY)
    assert await news(app) == [OVER]
    outage.unanswered("w", AWAY)
    assert await news(app) == [BEGUN]


async def test_two_workers_of_a_process_are_one_voice(app, outage):
    outage.unanswered("a", AWAY)
    outage.unanswered("b", AWAY + 1)
    assert await news(app) == [BEGUN]
    for now in (0.0, STEADY):
        outage.answered("a", now)
        outage.answered("c", now)
    assert await news(app) == []
    for now in (50.0, 50.0 + STEADY):
        outage.answered("b", now)
    assert await news(app) == [OVER]


async def test_a_worker_that_ends_tells_the_end_only_if_it_saw_it(app, outage):
    outage.unanswered("a", AWAY)
    outage.leave("a", reached=False)
    assert await news(app) == [BEGUN]
    outage.answered("its successor", 0.0)
    assert await news(app) == [OVER]
    outage.unanswered("a", AWAY)
    outage.leave("a", reached=True)
    assert await news(app) == [BEGUN, OVER]


async def test_it_is_switched_off_like_any_other(database, clock):
    told = []
    off = Alerting(sinks=[told.append], off={"database_unreachable"})
    app = Resilient(database, handlers=[nothing], upgrade=False, alerts=off)
    app.alerts.outage.unanswered("w", AWAY)
    await app.alerts._sinks.finish()
    assert told == []


async def test_what_is_told_reaches_its_sinks_although_the_process_ends_without_a_database(app, caplog):
    """Other alerts cannot be written then."""
    caplog.set_level(logging.WARNING, "resilient.alerts")

    async def away(*_, **__):
        raise DatabaseUnreachable("gone")

    app.alerts.repaired(1)
    app.alerts.outage.unanswered("w", AWAY)
    real, app.database.transaction = app.database.transaction, away
    await app.alerts.close()
    app.database.transaction = real
    assert [(n.state, n.alert.name) for n in app.told] == [BEGUN]
    assert "1 alerts were not told" in caplog.text


def beating(app, outage):
    link = DatabaseLink()
    link.monotonic = lambda: 1000.0
    return link, Heartbeat(app.database, "w", timedelta(seconds=60), link, None, SimpleNamespace(), outage, Counts())


async def test_a_process_that_stood_still_accuses_nobody(app, outage):
    """SIGSTOP for an hour, in the middle of a beat."""
    _, beats = beating(app, outage)
    beats._unanswered_since = 1000.0
    beats._report(4600.0, 3600.0)
    assert await news(app) == []
    beats._report(4600.0 + AWAY + 0.3, heartbeat.TICK)
    assert await news(app) == [BEGUN]


async def test_a_worker_that_ends_in_a_silence_does_not_take_it_for_an_answer(app, outage):
    """The beat has not failed yet: it waits."""
    link, beats = beating(app, outage)
    beats._unanswered_since = 1000.0 - AWAY
    assert not beats.is_answered
    beats._unanswered_since = 999.9
    assert beats.is_answered
    link.is_cut_off = True
    assert not beats.is_answered


async def test_a_beat_under_way_is_no_news(app, outage):
    link, beats = beating(app, outage)
    outage.unanswered("w", AWAY)
    outage.answered("w", 1000.0)
    beats._unanswered_since = 1000.0 + STEADY - 0.1
    beats._report(1000.0 + STEADY, heartbeat.TICK)
    beats._unanswered_since = None
    beats._report(1000.0 + STEADY + 0.2, heartbeat.TICK)
    assert await news(app) == [BEGUN, OVER]
    assert not link.is_cut_off


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_worker_that_ends_before_the_database_was_there_keeps_no_outage_open(how, clock):
    told = []
    app = Resilient("postgresql://nobody@127.0.0.1:1/none", handlers=[nothing], alerts=[told.append], clock=clock.now)
    app.told, worker, outage, seconds = told, app.worker(), app.alerts.outage, itertools.count(0, AWAY)
    worker.monotonic = lambda: float(next(seconds))
    task = asyncio.create_task(worker.run(signals=False))
    await until(lambda: outage.alert is not None)
    worker.stop() if how == "stop" else task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    outage.answered("another", 0.0)
    assert await news(app) == [BEGUN, OVER]
    await app.close()
