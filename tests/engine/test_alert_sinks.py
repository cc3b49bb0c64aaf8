"""Sinks of alerts that refuse one of several notices, and sinks that are away."""

import asyncio
from datetime import UTC, datetime

import pytest

from resilient import Notice, Resilient
from resilient.core.alerts.rules import AlertInfo
from resilient.engine import alerts
from tests.engine.test_alerts import webhook
from tests.helpers import LIMIT, until

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def notice_of(subject):
    alert = AlertInfo(fingerprint=subject, name="dead", subject=subject, detail={}, count=1, first_at=NOW, last_at=NOW)
    return Notice("new", alert, subject)


async def tell(sink, *subjects):
    sinks = alerts.Sinks([sink])
    sinks.tell([notice_of(one) for one in subjects])
    await sinks.finish()


async def test_a_function_that_fails_over_one_notice_gets_the_others(caplog):
    heard = []

    def page(notice):
        heard.append({"b": 1, "c": 2, "d": 3}[notice.alert.subject])

    await tell(page, "a", "b", "x", "c", "d", "y")
    assert heard == [1, 2, 3]
    assert caplog.text.count("3 alerts did not reach the function ") == 1
    assert caplog.text.count("did not reach") == 1


async def test_one_that_takes_none_gets_no_more_after_the_third(caplog):
    heard = []

    def page(notice):
        heard.append(notice.alert.subject)
        raise ValueError

    await tell(page, *"abcdef")
    assert heard == ["a", "b", "c"]
    assert "6 alerts did not reach the function " in caplog.text


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_webhook_that_refuses_one_document_gets_the_others(caplog, monkeypatch, status):
    monkeypatch.setattr(alerts, "PAUSES", (0, 0))
    async with webhook(status, status, status) as (url, bodies):
        await tell(url, "a", "b", "c")
    assert [body["text"] for body in bodies] == ["a", "a", "a", "b", "c"]
    assert f"1 alerts did not reach the webhook at 127.0.0.1: 127.0.0.1 answered {status}" in caplog.text


async def test_one_that_is_away_gets_no_more(caplog, monkeypatch):
    monkeypatch.setattr(alerts, "PAUSES", (0, 0))
    async with webhook(503, 503, 503) as (url, bodies):
        await tell(url, "a", "b", "c")
    assert [body["text"] for body in bodies] == ["a", "a", "a"]
    assert "3 alerts did not reach the webhook at 127.0.0.1" in caplog.text


async def test_one_that_comes_back_later_gets_everything_in_order(caplog, monkeypatch):
    monkeypatch.setattr(alerts, "PAUSES", (0, 0))
    monkeypatch.setattr(alerts, "LATER", (0.001, 0.002))
    caplog.set_level("INFO")
    async with webhook(*[503] * 7, *[200] * 5) as (url, bodies):
        sinks = alerts.Sinks([url])
        sinks.tell([notice_of("a"), notice_of("b")])
        await until(lambda: len(bodies) > 4)
        sinks.tell([notice_of("c")])
        await until(lambda: len(bodies) == 10)
        await sinks.finish()
    assert [body["text"] for body in bodies] == [*"aaaaaaaa", "b", "c"]
    (away,) = [line for line in caplog.messages if "does not answer" in line]
    assert away == "the webhook at 127.0.0.1 does not answer, 2 alerts wait for it: 127.0.0.1 answered 503"
    assert caplog.messages[-1] == "the webhook at 127.0.0.1 takes alerts again"
    assert "did not reach" not in caplog.text


@pytest.mark.parametrize("last", [200, 503])
async def test_one_that_is_away_is_tried_once_more_when_the_process_ends(caplog, monkeypatch, last):
    monkeypatch.setattr(alerts, "PAUSES", (0, 0))
    async with webhook(503, 503, 503, last, 200) as (url, bodies):
        sinks = alerts.Sinks([url])
        sinks.tell([notice_of("a"), notice_of("b")])
        await until(lambda: "does not answer" in caplog.text)
        await sinks.finish()
    assert [body["text"] for body in bodies] == [*"aaaa", *("b" if last == 200 else "")]
    assert ("2 alerts did not reach the webhook" in caplog.text) == (last == 503)


async def test_one_that_is_away_delays_no_other(monkeypatch):
    monkeypatch.setattr(alerts, "PAUSES", ())
    heard = []
    async with webhook(503) as (url, _):
        sinks = alerts.Sinks([url, heard.append])
        sinks.tell([notice_of("a")])
        await until(lambda: heard)


async def test_a_function_that_is_slow_over_one_notice_gets_the_others(caplog, monkeypatch):
    monkeypatch.setattr(alerts, "LONGEST", 0.01)
    heard = []

    async def page(notice):
        heard.append(notice.alert.subject)
        if notice.alert.subject == "a":
            await asyncio.Event().wait()

    await tell(page, *"abc")
    assert heard == [*"abc"]
    assert "1 alerts did not reach the function " in caplog.text


async def test_what_waits_for_a_task_that_is_cancelled_is_logged(caplog):
    async def page(_notice):
        await asyncio.Event().wait()

    sinks = alerts.Sinks([page])
    sinks.tell([notice_of(one) for one in "abc"])
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sinks.finish(), 0.01)
    assert "3 alerts did not reach the function " in caplog.text


async def test_the_end_of_the_process_waits_for_no_pause(caplog, monkeypatch):
    monkeypatch.setattr(alerts, "PAUSES", (3600, 3600))
    async with webhook(503, 503, 503) as (url, bodies):
        sinks = alerts.Sinks([url])
        sinks.tell([notice_of("a")])
        await until(lambda: bodies)
        await asyncio.wait_for(sinks.finish(), LIMIT)
    assert len(bodies) == 3
    assert "1 alerts did not reach the webhook" in caplog.text


async def test_more_than_a_queue_holds_is_only_logged(caplog, monkeypatch):
    monkeypatch.setattr(alerts, "MOST_WAITING", 3)
    go, heard = asyncio.Event(), []

    async def page(notice):
        await go.wait()
        heard.append(notice.alert.subject)

    sinks = alerts.Sinks([page])
    sinks.tell([notice_of(one) for one in "ab"])
    sinks.tell([notice_of(one) for one in "cde"])
    assert "page is too slow: 2 alerts are only logged" in caplog.text
    go.set()
    await sinks.finish()
    assert heard == [*"abc"]


async def test_nothing_is_written_after_the_end_of_an_app(database, monkeypatch):
    app, began, go = Resilient(database), asyncio.Event(), asyncio.Event()
    await app.ready()
    calls = []

    async def away(*_args, **_kwargs):
        calls.append(1)
        began.set()
        await go.wait()
        raise OSError

    monkeypatch.setattr(alerts, "FLUSH_EVERY", 0.0)
    monkeypatch.setattr(app.database, "transaction", away)
    app.alerts.repaired(3)
    await began.wait()  # the flush is under way, fails while the app is closed, and would be tried again
    closing = asyncio.create_task(app.alerts.close())
    await asyncio.sleep(0)
    go.set()
    await closing
    assert app.alerts._timer is None
    monkeypatch.undo()
    await app.close()


def test_a_flush_that_a_closed_loop_has_left_stands_in_nobodys_way(tmp_path, monkeypatch):
    app, began = Resilient(f"sqlite:///{tmp_path}/app.db"), asyncio.Event()
    monkeypatch.setattr(alerts, "FLUSH_EVERY", 0.0)
    left = []  # as long as the test runs: a task that is dropped says so

    async def begin():
        await app.ready()

        async def hang(*_args, **_kwargs):
            began.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(app.database, "transaction", hang)
            app.alerts.repaired(3)
            await began.wait()
        left.append(app.alerts._flushing)

    async def go_on():
        app.alerts.repaired(4)
        await until(lambda: app.alerts._flushing is not left[0])
        await app.alerts._flushing
        written = [(one.name, one.count) for one in await app.alerts.list()]
        await app.close()
        return written

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    assert asyncio.run(asyncio.wait_for(go_on(), LIMIT)) == [("invariant", 1)]
    left[0]._log_destroy_pending = False


def test_each_event_loop_has_its_deliveries():
    heard = []
    sinks = alerts.Sinks([lambda notice: heard.append(notice.alert.subject)])

    async def tell_in_a_loop(subject):
        sinks.tell([notice_of(subject)])
        await sinks.finish()

    for subject in "ab":
        asyncio.run(tell_in_a_loop(subject))
    assert heard == ["a", "b"]
