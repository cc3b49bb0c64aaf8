"""Alerts end to end: noticed by workers, found by housekeeping, told to functions and webhooks."""

import asyncio
import json
import logging
import threading
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest

from resilient import (
    AlertInfo,
    Alerting,
    DatabaseUnreachable,
    Failure,
    FailureKind,
    InvalidInput,
    Notice,
    Permanent,
    Resilient,
    Schedule,
    Transient,
    handler,
)
from resilient.core.alerts import rules
from resilient.core.gates.admission import ResourceFacts
from resilient.core.gates.breaker import BreakerFacts
from resilient.core.sync.stream import Cursor
from resilient.engine import alerts
from resilient.store import alerts as store
from resilient.store import sync as cursors
from resilient.store.gates import controls as gates
from resilient.store.gates import resources
from resilient.store.gates.circuits import Change
from resilient.store.jobs import finishing
from resilient.wire.publishers import notify
from tests.helpers import LIMIT, hear, until

SECRET = "T0SECRET"


@handler("sync")
async def sync(job):
    raise {"transient": Transient, "permanent": Permanent}[job.payload](f"{job.payload} trouble")


@handler("fine")
async def fine(job):
    pass


@pytest.fixture
async def make(database):
    """An app that writes its notices down in ``app.told``."""
    made = []

    def make(*, schedules=(), **config):
        told = []
        app = Resilient(
            database, handlers=[sync, fine], schedules=schedules, alerts=Alerting(sinks=[told.append], **config)
        )
        app.told = told
        made.append(app)
        return app

    yield make
    for app in made:
        await app.alerts.close()


async def told(app):
    """What was told since the last time: (state, name, subject)."""
    if app.alerts._flushing is not None:  # a round that began by itself
        await app.alerts._flushing
    await app.alerts._sinks.finish()
    news = [(n.state, n.alert.name, n.alert.subject) for n in app.told]
    app.told.clear()
    return news


async def housekeep(app):
    await app.alerts.keep_house()
    return await told(app)


async def housekeep_texts(app, wanted):
    """One look brings these messages, each told by a part of it."""
    await app.alerts.keep_house()
    await app.alerts._sinks.finish()
    texts = [n.text for n in app.told]
    app.told.clear()
    assert len(texts) == len(wanted), texts
    for part in wanted:
        assert sum(part in text for text in texts) == 1, texts


def ended(app, *, kind="sync", decision="retry", error_kind="transient", code=None, error="trouble", times=1, on="a/1"):
    execution = SimpleNamespace(row=SimpleNamespace(kind=kind, resource_key=on), id=uuid4())
    transition = SimpleNamespace(
        decision=decision, error_kind=error_kind, error_code=code, error=error, resource_key=None
    )
    for _ in range(times):
        app.alerts.noticed(execution, transition)


class TestNoticed:
    async def test_a_worker_tells_of_its_failures_by_itself(self, make):
        app = make()
        for payload in ("transient", "permanent", "permanent"):
            await app.enqueue("sync", payload, resource_key="github/a")
        await app.enqueue("fine", resource_key="github/a")
        await app.worker().drain(timeout=LIMIT)
        await until(lambda: len(app.told) == 2)  # the timer is the loop's own
        assert sorted(await told(app)) == [("new", "dead", "sync"), ("new", "new_error", "sync")]
        await app.alerts.flush()  # of a slow machine the second death is another turn's
        first, second = sorted(await app.alerts.list(), key=lambda alert: alert.name)
        assert (first.name, first.count, first.detail["error_kind"]) == ("dead", 2, "permanent")
        assert (second.count, second.detail["resource"]) == (1, "github/a")
        assert "trouble" in second.detail["error"]
        assert app.sync.alerts.list() == await app.alerts.list()

    async def test_told_once_and_again_after_an_hour(self, make, clock):
        app = make()
        ended(app, times=3)
        await app.alerts.flush()
        assert await told(app) == [("new", "new_error", "sync")]
        for _ in range(5):
            clock.advance(minutes=13)
            ended(app, times=10)
            await app.alerts.flush()
        assert await told(app) == [("again", "new_error", "sync")]
        assert (await app.alerts.list())[0].count == 53

    async def test_another_code_is_news_and_a_flood_of_codes_is_not(self, make):
        app = make()
        ended(app, code="http_500")
        ended(app, code="http_503")
        for n in range(200):
            ended(app, code=f"order-{n}x{n}y")
        await app.alerts.flush()
        assert len(await app.alerts.list(limit=1000)) == 52
        assert {len(n.others) for n in app.told} <= {0, 20}
        assert len(await told(app)) == 2

    async def test_one_accounts_codes_do_not_silence_the_alerts_about_others(self, make):
        app = make()
        for n in range(200):  # a tenant answers with another code each time
            ended(app, code=f"order-{n}x{n}y", on="a/evil")
        await app.alerts.flush()
        await told(app)
        for code in ("bad_email", "order-7x7y"):  # one that is new, and one that the tenant guessed before
            ended(app, code=code, on="a/good")
            await app.alerts.flush()
        assert await told(app) == [("new", "new_error", "sync")] * 2
        details = [one.detail for one in await app.alerts.list(limit=1000)]
        assert {one["resource"] for one in details if one["error_code"] == "bad_email"} == {"a/good"}
        assert {one["resource"] for one in details if one["error_code"] == "other"} == {"a/evil"}

    async def test_codes_are_forgotten_with_their_alerts(self, make, clock):
        app = make()
        for n in range(200):
            ended(app, code=f"order-{n}x{n}y")
        await app.alerts.flush()
        clock.advance(hours=25)
        await housekeep(app)
        assert not await app.alerts.list()
        ended(app, code="order-199x199y")
        await app.alerts.flush()
        assert [one.detail["error_code"] for one in await app.alerts.list()] == ["order-199x199y"]

    async def test_it_costs_next_to_nothing(self, make):
        app = make()
        began = time.thread_time()
        ended(app, times=10_000)
        assert time.thread_time() - began < 1
        assert len(app.alerts._pending) == 1

    async def test_workflows_that_cannot_be_undone_in_one_moment_are_counted(self, make):
        app = make()
        for number in range(3):
            app.alerts.add(rules.stuck("signup", f"wf-{number}"))
        await app.alerts.flush()
        await app.alerts._sinks.finish()
        assert [n.text.split(",")[0] for n in app.told] == [
            "signup: workflow wf-0 (and 2 others of that name) cannot be undone"
        ]

    async def test_a_condition_that_could_not_be_written_counts_once(self, make, monkeypatch):
        app = make()
        transaction = app.database.transaction

        async def away(*_):
            app.alerts.add(rules.of_credentials("a/1", "needs_reauth", None))
            raise DatabaseUnreachable("away")

        app.alerts.add(rules.of_credentials("a/1", "needs_reauth", None))
        monkeypatch.setattr(app.database, "transaction", away)
        with pytest.raises(DatabaseUnreachable):
            await app.alerts.flush()
        monkeypatch.setattr(app.database, "transaction", transaction)
        await app.alerts.flush()
        assert [one.count for one in await app.alerts.list()] == [1]

    async def test_memory_is_bounded(self, make, caplog):
        app = make()
        for n in range(1_500):
            ended(app, kind=f"k{n}")
        assert len(app.alerts._pending) == 1_000
        await app.alerts.flush()
        assert "500 failures of too many different sorts raised no alert" in caplog.text

    async def test_a_database_that_is_away_loses_nothing(self, make, monkeypatch):
        app = make()
        ended(app, times=2)

        async def away(*_, **__):
            ended(app)  # meanwhile
            raise ConnectionError

        with monkeypatch.context() as patch:
            patch.setattr(app.database, "transaction", away)
            with pytest.raises(ConnectionError):
                await app.alerts.flush()
        await app.alerts.flush()
        assert (await app.alerts.list())[0].count == 3

    async def test_a_notice_of_another_transaction_survives_a_database_that_is_away(self, make, monkeypatch):
        app, finding = make(), rules.repaired(1)
        await app.database.transaction(
            lambda c, d: store.record(c, d, [finding], d.now(c), lasting=finding.name in rules.CONDITIONS)
        )
        app.alerts.soon()

        async def away(*_, **__):
            raise ConnectionError

        with monkeypatch.context() as patch:
            patch.setattr(app.database, "transaction", away)
            with pytest.raises(ConnectionError):
                await app.alerts.flush()
        await app.alerts.flush()
        assert await told(app) == [("new", "invariant", finding.subject)]

    async def test_what_is_switched_off(self, make):
        app = make(off={"new_error"})
        ended(app)
        ended(app, decision="dead")
        await app.alerts.flush()
        assert await told(app) == [("new", "dead", "sync")]

    async def test_a_quiet_alert_is_closed_without_a_word_and_is_news_afterwards(self, make, clock):
        app = make()
        ended(app)
        await app.alerts.flush()
        await told(app)
        clock.advance(days=1)
        assert await housekeep(app) == []
        assert await app.alerts.list() == []
        ended(app)
        await app.alerts.flush()
        assert await told(app) == [("new", "new_error", "sync")]

    async def test_closing_the_app_tells_the_last_of_it(self, database):
        heard = []
        app = Resilient(database, alerts=heard.append)
        ended(app)
        await app.alerts.close()
        assert [n.alert.name for n in heard] == ["new_error"]

    async def test_closing_the_app_survives_that_its_writing_was_cancelled(self, database):
        heard = []
        app = Resilient(database, alerts=heard.append)
        ended(app)
        app.alerts._start()
        app.alerts._flushing.cancel()  # by a program that ends all tasks before it closes the app
        await app.close()
        assert [n.alert.name for n in heard] == ["new_error"]


class TestHousekeeping:
    async def test_an_open_circuit_and_its_end(self, make, clock, database):
        app = make()
        await database.transaction(gates.set_auth, "jira/7", "needs_reauth")
        await database.transaction(_open_circuit, "github")
        found = sorted(await housekeep(app))
        assert found == [("new", "circuit_open", "github"), ("new", "needs_reauth", "jira/7")]
        await database.transaction(gates.close, "github")
        await database.transaction(gates.set_auth, "jira/7", "ok")
        clock.advance(minutes=4)
        assert await housekeep(app) == []
        clock.advance(minutes=1)
        over = await housekeep(app)
        assert sorted(over) == [("resolved", "circuit_open", "github"), ("resolved", "needs_reauth", "jira/7")]
        assert await housekeep(app) == []

    async def test_a_circuit_is_told_without_waiting_for_housekeeping(self, make, clock):
        app = make()
        failure = Failure(FailureKind.TRANSIENT, code="http_503")
        before, after = ResourceFacts("github"), ResourceFacts("github", BreakerFacts("open", 1, opened_at=clock.now()))
        app.alerts.note_breaker(Change(before, after, failure))
        await app.alerts.flush()
        assert await told(app) == [("new", "circuit_open", "github")]
        (alert,) = await app.alerts.list()
        assert (alert.detail["error"], alert.detail["error_code"]) == ("http 503", "http_503")
        app.alerts.note_breaker(Change(after, before))
        await app.alerts.flush()
        assert await told(app) == []

    async def test_an_absurd_wait(self, make, clock, database):
        app = make()
        await database.transaction(gates.cool_down, "github/a", clock.now() + timedelta(days=400), "abuse", 0.5)
        await database.transaction(gates.cool_down, "github/b", clock.now() + timedelta(hours=20), "abuse", 0.5)
        assert await housekeep(app) == [("new", "long_throttle", "github/a")]

    async def test_an_outage_of_many_accounts_is_one_message(self, make, database):
        app = make()
        for n in range(30):
            await database.transaction(_open_circuit, f"github/{n}")
        await app.alerts.keep_house()
        await app.alerts._sinks.finish()
        (one,) = app.told
        assert "(and 29 others like it at github: " in one.text

    async def test_a_thousand_accounts_with_one_cause_are_one_message_each_hour_and_one_at_the_end(
        self, make, clock, database
    ):
        app, keys = make(), [f"github/{n:03}" for n in range(900)]

        def all_(change, *args):
            def run(c, d):
                for key in keys:
                    change(c, d, key, *args)

            return database.transaction(run)

        await all_(gates.set_auth, "needs_reauth")
        await housekeep_texts(app, ["(and 899 others like it at github: github/001, github/002, github/003, …)"])
        assert await housekeep(app) == []
        await database.transaction(gates.set_auth, "jira/1", "needs_reauth")  # another cause
        await housekeep_texts(app, ["jira/1: "])
        for _ in range(15):
            clock.advance(minutes=5)
            await app.alerts.keep_house()
        await app.alerts._sinks.finish()
        again = [n.text for n in app.told]
        app.told.clear()
        assert len(again) == 2
        assert sum("(and 899 others like it at github" in text for text in again) == 1
        for key in keys[:400]:
            await database.transaction(gates.set_auth, key, "ok")
        clock.advance(minutes=5)
        await app.alerts.keep_house()
        clock.advance(minutes=5)
        assert await housekeep(app) == []  # not over: 500 are left
        await all_(gates.set_auth, "ok")
        clock.advance(minutes=5)
        await housekeep_texts(app, ["(and 899 others like it at github"])

    async def test_accounts_that_fail_one_after_the_other_are_a_few_messages(self, make, clock, database):
        app, texts = make(), []
        for n in range(120):
            await database.transaction(gates.set_auth, f"github/{n:03}", "needs_reauth")
            clock.advance(seconds=20)
            await app.alerts.keep_house()
            await app.alerts._sinks.finish()
        texts = [notice.text for notice in app.told]
        assert len(texts) == 7
        assert "(and 5 others like it at github)" in texts[5]
        assert "(and 50 others like it at github)" in texts[6]

    async def test_a_stream_of_which_no_pass_ends(self, make, clock, database):
        app = make()

        def put(key, expected, completed_at):
            def run(c, d):
                cursor = Cursor(completed_at=completed_at, expected=expected)
                cursors.write_if_unmoved(c, d, (key, "issues", ""), cursor, None, d.now(c))

            return database.transaction(run)

        began = clock.now()
        await put("github/a", 3600.0, began - timedelta(hours=1))
        await put("github/b", 3600.0, None)
        await put("github/c", None, began - timedelta(days=9))
        await put("github/d", 86400.0, began)
        clock.advance(hours=1, minutes=59)
        assert await housekeep(app) == []
        clock.advance(minutes=2)
        assert await housekeep(app) == [("new", "no_success", "issues")]
        clock.advance(hours=1)
        await housekeep_texts(app, ["in time for 2 accounts, 3 times as long as expected; the last one of github/a"])
        assert await app.streams.forget("issues", "github/*") == 4
        clock.advance(minutes=6)
        assert await housekeep(app) == [("resolved", "no_success", "issues")]
        with pytest.raises(InvalidInput, match="this would forget every stream"):
            await app.streams.forget()

    async def test_periods_that_would_begin_before_all_time(self, make, clock, database):
        """They are never over; an error here would keep every other alert back."""
        slow = Schedule(sync, every="3653d", for_each=["a/1"])
        app = make(periods=10_000, schedules=[slow])
        await app.schedules.tick()
        cursor = Cursor(expected=timedelta(days=3653).total_seconds())
        await database.transaction(cursors.write_if_unmoved, ("a/1", "issues", ""), cursor, None, clock.now())
        app.alerts.repaired(1)
        await app.alerts.flush()
        clock.advance(hours=2)
        app.alerts.repaired(1)
        assert await housekeep(app) == [("new", "invariant", "turns")]

    async def test_a_worker_that_stops_delivers_its_last_alerts(self, database):
        heard = []

        async def slow(notice):
            await asyncio.sleep(0.2)
            heard.append(notice.alert.name)

        app = Resilient(database, handlers=[sync], alerts=slow)
        await app.enqueue("sync", "permanent", resource_key="github/a")
        worker = app.worker()
        running = asyncio.create_task(worker.run(signals=False))
        while not worker.ended:  # noqa: ASYNC110 - the worker has no event for it
            await asyncio.sleep(0.01)
        worker.stop()
        await running
        assert heard == ["dead"]

    async def test_a_backlog_that_nobody_works_on(self, make, clock):
        app = make(backlog="10m")
        await app.enqueue("fine", resource_key="github/a")
        clock.advance(minutes=10)
        assert await housekeep(app) == []
        clock.advance(1)
        assert await housekeep(app) == [("new", "backlog", "github")]
        await app.worker().drain(timeout=LIMIT)
        clock.advance(minutes=5)
        assert await housekeep(app) == [("resolved", "backlog", "github")]

    async def test_most_executions_fail(self, make, clock):
        app = make(off={"dead", "new_error"}, failure_volume=4)
        for payload in ("permanent",) * 3:
            await app.enqueue("sync", payload, resource_key="github/a")
        await app.worker().drain(timeout=LIMIT)
        assert await housekeep(app) == []
        await app.enqueue("sync", "permanent", resource_key="github/b")
        await app.enqueue("fine", resource_key="github/a")
        await app.worker().drain(timeout=LIMIT)
        found = sorted(await housekeep(app))
        assert found == [("new", "failure_rate", "github/a"), ("new", "failure_rate", "sync")]
        clock.advance(minutes=11)
        assert len(await housekeep(app)) == 2

    async def test_jobs_that_died_without_an_execution(self, make, clock, database):
        app = make()
        assert await housekeep(app) == []
        for _ in range(2):
            await app.enqueue("fine", resource_key="github/a", expires_at=clock.now() + timedelta(seconds=5))
        clock.advance(20)
        await database.transaction(finishing.expire, clock.now(), lambda _: "expired")
        clock.advance(1)
        assert await housekeep(app) == [("new", "dead", "fine")]
        assert await housekeep(app) == []
        (alert,) = await app.alerts.list()
        assert (alert.count, alert.detail["error_kind"]) == (2, "expired")

    async def test_a_schedule_that_does_not_succeed(self, make, clock):
        app = make(schedules=[Schedule("fine", every="1h", resource_key="a", name="s")], off={"backlog"})
        await app.schedules.tick()
        heard = []
        for _ in range(6):
            clock.advance(hours=1)
            await app.schedules.tick()
            heard += await housekeep(app)
        assert heard[0] == ("new", "no_success", "s")
        assert (await app.alerts.list())[0].first_at == clock.now() - timedelta(hours=2)
        await app.worker().drain(timeout=LIMIT)
        clock.advance(minutes=5)
        assert await housekeep(app) == [("resolved", "no_success", "s")]

    async def test_another_programs_schedule_is_none_of_ours(self, make, clock):
        ours = make(schedules=[Schedule("fine", every="1h", resource_key="a", name="s")], off={"backlog"})
        await ours.schedules.tick()
        clock.advance(hours=9)
        assert await housekeep(ours) == [("new", "no_success", "s")]
        clock.advance(hours=1)
        assert await housekeep(make(off={"backlog"})) == []
        assert len(await ours.alerts.list()) == 1

    async def test_lost_turns(self, make, database):
        app = make()
        await database.transaction(resources.ensure, ["a"])
        await app.enqueue("fine", resource_key="a")
        await database.transaction(lambda c, d: d.run(c, "DELETE FROM {turn}"))
        worker = app.worker()
        await worker.sweeper.chores()
        await app.alerts.flush()
        assert ("new", "invariant", "turns") in await told(app)

    async def test_rules_that_are_off(self, make, clock, database):
        app = make(backlog=None, failure_rate=None, throttled=None, periods=None)
        await database.transaction(gates.cool_down, "github/a", clock.now() + timedelta(days=400), "abuse", 0.5)
        await app.enqueue("fine", resource_key="b")
        clock.advance(hours=5)
        assert await housekeep(app) == []


def _open_circuit(c, d, key):
    resources.ensure(c, d, [key])
    d.run(
        c,
        "UPDATE {resource} SET breaker = 'open', opened_at = :now, last_error = 'HTTP 503' WHERE key = :key",
        {"now": d.now(c), "key": key},
    )


class TestConfig:
    @pytest.mark.parametrize(
        "given",
        [Alerting(), print, "https://hooks.example.com/x", [print, "https://hooks.example.com/x"], None],
    )
    def test_what_an_app_may_be_given(self, database, given):
        assert isinstance(Resilient(database, alerts=given).alerts.config, Alerting)

    @pytest.mark.parametrize("given", [5, [5], "hooks.example.com"])
    def test_what_it_may_not(self, database, given):
        with pytest.raises(InvalidInput, match=r"alerts= takes|a sink of alerts is"):
            Resilient(database, alerts=given)

    async def test_a_page_has_a_bound(self, make):
        with pytest.raises(InvalidInput, match="limit=0"):
            await make().alerts.list(limit=0)


# -- sinks -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def webhook(*statuses):
    """A server on this machine that answers each request with the next status; (its URL, the bodies it got)."""
    bodies, answers = [], list(statuses)

    async def serve(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        status = answers.pop(0) if answers else 200
        if status:
            writer.write(b"HTTP/1.1 %d X\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n" % status)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/services/{SECRET}?token={SECRET}", bodies


class TestSinks:
    async def tell(self, database, *targets):
        app = Resilient(database, alerts=Alerting(sinks=targets))
        ended(app)
        await hear(app)

    async def test_a_webhook_gets_a_document(self, database, caplog):
        caplog.set_level(logging.DEBUG)
        async with webhook(200) as (url, bodies):
            await self.tell(database, url)
        (body,) = bodies
        assert body["text"].startswith("sync: fails with transient on a/1")
        assert body["alert"]["count"] == 1
        assert SECRET not in caplog.text

    async def test_a_chat_sees_no_markup_of_a_stranger(self, database):
        async with webhook(200) as (url, bodies):
            plain = []
            app = Resilient(database, alerts=Alerting(sinks=[url, plain.append]))
            ended(app, error="<!channel> [pay here](https://evil.example) @all")
            await hear(app)
        (body,), (notice,) = bodies, plain
        assert notice.text.endswith("<!channel> [pay here](https://evil.example) @all")
        assert body["text"].endswith("<\u200b!channel> [pay here]\u200b(https://evil.example) @\u200ball")
        assert body["alert"]["detail"]["error"] == notice.alert.detail["error"]

    @pytest.mark.parametrize("status", [500, 302, 429, 0])
    async def test_one_that_fails_is_tried_three_times(self, database, caplog, monkeypatch, status):
        caplog.set_level(logging.DEBUG)
        monkeypatch.setattr(alerts, "PAUSES", (0, 0))
        async with webhook(status, status, status) as (url, bodies):
            await self.tell(database, url)
        assert len(bodies) == 3
        assert "1 alerts did not reach the webhook at 127.0.0.1: 127.0.0.1" in caplog.text
        assert SECRET not in caplog.text

    async def test_workers_of_a_fleet_do_not_try_again_at_one_moment(self, monkeypatch):
        pauses, spread_upwards = [], alerts.spread_upwards

        def spread(seconds, roll):
            pauses.append(spread_upwards(seconds, roll))
            return pauses[-1]

        async def post(url, document):
            raise alerts.notify.NotDelivered("away")

        monkeypatch.setattr(alerts, "spread_upwards", spread)
        monkeypatch.setattr(alerts.notify, "post", post)
        now = datetime.now(UTC)
        alert = AlertInfo(fingerprint="f", name="dead", subject="sync", detail={}, count=1, first_at=now, last_at=now)
        for roll in (0.0, 0.5):
            fleet = alerts.Sinks(["http://127.0.0.1:1/"], lambda roll=roll: roll)
            fleet.tell([Notice("new", alert, "text")])
            await fleet.finish()
        assert pauses == [1.0, 5.0, 1.25, 6.25]

    async def test_one_that_comes_back(self, database, caplog, monkeypatch):
        monkeypatch.setattr(alerts, "PAUSES", (0, 0))
        async with webhook(503, 200) as (url, bodies):
            await self.tell(database, url)
        assert len(bodies) == 2
        assert "did not reach" not in caplog.text

    async def test_nobody_is_there(self, database, caplog, monkeypatch):
        monkeypatch.setattr(alerts, "PAUSES", (0, 0))
        async with webhook() as (url, _):
            pass
        await self.tell(database, url)
        assert "did not reach the webhook at 127.0.0.1: 127.0.0.1: ConnectError" in caplog.text

    async def test_functions_of_every_sort(self, database):
        heard = []

        async def coroutine(notice):
            heard.append(("coroutine", notice.state))

        class Callable:
            async def __call__(self, notice):
                heard.append(("object", notice.state))

        await self.tell(database, coroutine, Callable(), lambda n: heard.append(("plain", n.state)))
        assert sorted(heard) == [("coroutine", "new"), ("object", "new"), ("plain", "new")]

    async def test_one_that_fails_or_hangs_stops_no_other(self, database, caplog, monkeypatch):
        monkeypatch.setattr(alerts, "LONGEST", 0.2)
        heard, go_on = [], threading.Event()

        def broken(_):
            raise ValueError(SECRET)

        async def hanging(_):
            await asyncio.Event().wait()

        def stuck(_):
            go_on.wait(LIMIT)

        def hears(notice):
            heard.append(notice)

        await self.tell(database, broken, hanging, stuck, hears)
        await until(lambda: heard)
        for one in (broken, hanging, stuck):
            assert caplog.text.count(f"did not reach the function {one.__qualname__}") == 1
        go_on.set()
        assert SECRET not in caplog.text

    async def test_too_slow_for_more(self, database, caplog, monkeypatch):
        monkeypatch.setattr(alerts, "MOST_WAITING", 1)
        go = asyncio.Event()
        app = Resilient(database, alerts=lambda _: None)
        app.alerts._sinks = alerts.Sinks([lambda _: go.wait()])
        for kind in ("a", "b"):
            ended(app, kind=kind)
            await app.alerts.flush()
        assert "is too slow: 1 alerts are only logged" in caplog.text
        go.set()
        await app.alerts._sinks.finish()

    async def test_the_log_always_hears(self, database, caplog):
        caplog.set_level(logging.INFO, "resilient.alerts")
        await self.tell(database)
        (record,) = [r for r in caplog.records if r.name == "resilient.alerts"]
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith("new_error: sync: fails")

    async def test_a_url_that_is_none(self):
        with pytest.raises(notify.NotDelivered, match="x y"):
            await notify.post("http://x y/", {})
