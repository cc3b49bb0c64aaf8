"""Connections to destinations: one of each, another one once it is lost, and none left behind."""

import asyncio
import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sqlmodel import Session

from resilient import Destination, Event, JobFailure, Message, Nats, Resilient
from resilient.engine.events.publishers import Publishers
from resilient.wire.publishers.base import ConnectionLost, cut_off, lost, refused

sys.path.insert(0, str(Path(__file__).parents[1]))
import brokers

from tests.helpers import LIMIT, until

MESSAGE = Message("e-1", "order.placed", b"{}")


class Connection:
    def __init__(self, to):
        self.to, self.closed = to, 0
        self.mends = to.mends

    async def publish(self, _message):
        error = self.to.errors.pop(0) if self.to.errors else None
        if error == "hangs":
            await asyncio.sleep(60)
        if isinstance(error, asyncio.Event):
            await error.wait()
            error = lost("old news", "cut")
        if error is not None:
            raise error

    async def close(self):
        self.closed += 1


@dataclass(frozen=True)
class To(Destination):
    """A destination of the tests' own."""

    errors: list = field(default_factory=list)
    opened: list = field(default_factory=list)
    mends: bool = False

    async def connect(self):
        await asyncio.sleep(0)
        self.opened.append(Connection(self))
        if "refuses" in self.errors:
            raise lost("nobody there", "broker_down")
        return self.opened[-1]


async def publish(publishers, times=1):
    found = await asyncio.gather(*(publishers.publish("a", MESSAGE) for _ in range(times)), return_exceptions=True)
    return [type(one).__name__ for one in found if one is not None]


async def test_one_connection_however_many_ask_and_it_stays():
    to = To()
    publishers = Publishers({"a": to})
    assert await publish(publishers, 10) == []
    to.errors.append(refused("full", "full"))
    assert await publish(publishers) == ["JobFailure"]
    assert [one.closed for one in to.opened] == [0]
    await publishers.close()
    assert [one.closed for one in to.opened] == [1]


async def test_one_try_to_open_it_and_each_hears_of_it():
    to = To(errors=["refuses"])
    publishers = Publishers({"a": to})
    assert await publish(publishers, 5) == ["ConnectionLost"] * 5
    assert len(to.opened) == 1
    to.errors.clear()
    assert await publish(publishers) == []
    await publishers.close()


@pytest.mark.parametrize("how", ["lost", "hangs"])
@pytest.mark.parametrize("mends", [False, True])
async def test_what_is_lost_is_closed_and_opened_anew(how, mends):
    to = To(timeout=0.05, errors=["hangs" if how == "hangs" else lost("cut", "cut")], mends=mends)
    publishers = Publishers({"a": to})
    assert await publish(publishers) == ["ConnectionLost"]
    assert await publish(publishers) == []
    assert len(to.opened) == (1 if mends else 2)
    await publishers.close()
    assert [one.closed for one in to.opened] == [1] * len(to.opened)


async def test_what_an_older_connection_tells_late_is_not_about_the_new_one():
    late = asyncio.Event()
    to = To(errors=[late, lost("cut", "cut")])
    publishers = Publishers({"a": to})
    old = asyncio.create_task(publish(publishers))
    await asyncio.sleep(0.01)
    assert await publish(publishers) == ["ConnectionLost"]
    assert await publish(publishers) == []
    late.set()
    assert await old == ["ConnectionLost"]
    assert [one.closed for one in to.opened] == [1, 0]
    await publishers.close()


async def test_it_may_be_closed_while_it_is_opened():
    class Slow(To):
        async def connect(self):
            await asyncio.sleep(60)

    publishers = Publishers({"a": Slow()})
    asked = asyncio.create_task(publishers.publish("a", MESSAGE))
    await asyncio.sleep(0.01)
    await publishers.close()
    with pytest.raises(ConnectionLost):
        await asked


async def stubborn(end):
    """Goes on however often it is cancelled."""
    while not end.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await end.wait()


async def test_what_catches_its_cancellation_holds_up_nobody(monkeypatch):
    """An event that waits for a connection has an end, and so has the worker that closes what it opened."""
    monkeypatch.setattr("resilient.engine.events.publishers._CLOSE_TIMEOUT", 0.05)
    end = asyncio.Event()

    class Stubborn(To):
        async def connect(self):
            await stubborn(end)
            return await super().connect()

    opening, closing = Publishers({"a": Stubborn(timeout=0.05)}), Publishers({"a": (to := To())})
    assert await publish(closing) == []
    monkeypatch.setattr(to.opened[0], "close", lambda: stubborn(end))
    async with asyncio.timeout(LIMIT):
        assert await publish(opening, 3) == ["ConnectionLost"] * 3
        await opening.close()
        await closing.close()
    end.set()
    await until(
        lambda: not [task for task in asyncio.all_tasks() if "Stubborn" in repr(task) or "_close" in repr(task)]
    )


async def test_what_the_client_cancels_is_lost_and_what_we_cancel_is_cancelled():
    to = To(errors=[asyncio.CancelledError(), "hangs"])
    publishers = Publishers({"a": to})
    with pytest.raises(ConnectionLost):
        await publishers.publish("a", MESSAGE)
    asked = asyncio.create_task(publishers.publish("a", MESSAGE))
    await asyncio.sleep(0.01)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert [one.closed for one in to.opened] == [1, 0]
    await publishers.close()


def test_a_lost_connection_is_transient():
    error = lost("cut", "cut")
    assert isinstance(error, ConnectionLost)
    assert (error.failure.kind, error.failure.code) == ("transient", "cut")


class Changed(Event, type="thing.changed"):
    number: int


class Unheard(Event, type="thing.unheard"):
    """No stream listens to its subject."""


async def test_events_that_no_stream_listens_to_hold_up_no_others(sqlite_url):
    """However many they are, and for however long: they wait, and the others of their destination do not."""
    nats, server = pytest.importorskip("nats"), brokers.NatsServer()
    try:
        await asyncio.to_thread(server.start)
        connection = await nats.connect(server.url)
        await connection.jetstream().add_stream(name="THINGS", subjects=["events.thing.changed"])
        app = Resilient(sqlite_url, destinations={"nats": Nats(server.url)}, upgrade=False)
        with Session(app.database.sync_engine) as s:
            for _ in range(150):  # more than are sent at once
                app.outbox.publish(s, Unheard(), to=["nats"])
            for n in range(5):
                app.outbox.publish(s, Changed(number=n), to=["nats"])
            s.commit()
        await app.worker().drain(timeout=LIMIT)
        assert len(await app.outbox.list(type="thing.changed", state="succeeded")) == 5
        assert [one.breaker for one in await app.resources.list() if one.key == "outbox/nats"] in ([], ["closed"])
        assert await app.outbox.list(state="dead") == []
        await app.close()
        await connection.close()
    finally:
        server.close()


async def test_one_that_is_cut_off_over_another_is_sent_again_over_a_new_connection():
    """It did nothing wrong: it is charged with no attempt, and does not wait for the next one."""
    to = To(errors=[cut_off("over another", "cut", by_another=True) for _ in range(3)])
    publishers = Publishers({"a": to})
    assert await publish(publishers) == []
    assert len(to.opened) == 4
    to.errors.extend([cut_off("over another", "cut", by_another=True), "refuses"])
    with pytest.raises(ConnectionLost, match="nobody there"):  # away by now: that is what counts
        await publishers.publish("a", MESSAGE)
    await publishers.close()


async def test_what_is_cut_off_until_its_time_is_over_says_so():
    """Not that the destination were away."""
    to = To(timeout=0.2, errors=[cut_off("over another", "cut", by_another=True), "hangs"])
    publishers = Publishers({"a": to})
    with pytest.raises(ConnectionLost, match="over another") as caught:
        await publishers.publish("a", MESSAGE)
    assert caught.value.failure.counts_for_breaker is False
    await publishers.close()


async def test_silence_about_one_event_while_others_are_confirmed():
    """The connection works, so the others keep it; and the destination is not away."""
    to = To(timeout=0.5, errors=["hangs"])
    publishers = Publishers({"a": to})
    silent = asyncio.create_task(publishers.publish("a", MESSAGE))
    while not silent.done():
        await publish(publishers)
        await asyncio.sleep(0)
    error = silent.exception()
    assert "confirmed nothing within 0.5 s, but other events" in str(error)
    assert (error.failure.code, error.failure.counts_for_breaker) == ("no_confirm", False)
    assert [one.closed for one in to.opened] == [0]
    await publishers.close()


@pytest.mark.parametrize("known", [refused("of this one", "why"), lost("of all", "why"), None])
async def test_a_publisher_may_know_why_an_event_was_not_confirmed(known, monkeypatch):
    async def silence(_self, _message):
        return known

    monkeypatch.setattr(Connection, "silence", silence, raising=False)
    to = To(timeout=0.1, errors=["hangs"])
    publishers = Publishers({"a": to})
    with pytest.raises(JobFailure, match=str(known or "confirmed nothing")) as caught:
        await publishers.publish("a", MESSAGE)
    await publishers.close()
    assert [isinstance(caught.value, ConnectionLost)] == [known is None or isinstance(known, ConnectionLost)]
