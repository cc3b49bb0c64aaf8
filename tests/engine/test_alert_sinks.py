"""Sinks of alerts that do not take one of several notices told at once."""

from datetime import UTC, datetime

import pytest

from resilient import Notice
from resilient.core.alerts.rules import AlertInfo
from resilient.engine import alerts
from tests.engine.test_alerts import webhook

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def notice_of(subject):
    alert = AlertInfo(fingerprint=subject, name="dead", subject=subject, detail={}, count=1, first_at=NOW, last_at=NOW)
    return Notice("new", alert, subject)


async def tell(sink, *subjects):
    sinks = alerts.Sinks([sink])
    sinks.tell([notice_of(one) for one in subjects])
    await sinks.delivered()


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
