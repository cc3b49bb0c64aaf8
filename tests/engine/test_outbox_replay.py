"""What was published is published once more, with the ids and numbers it had."""

import asyncio
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from sqlmodel import Session

from resilient import Event, InvalidInput, JobFilter, Nats, Permanent, Resilient, Retention, Transient
from resilient.store.jobs import order

sys.path.insert(0, str(Path(__file__).parents[1]))
import brokers

from tests.helpers import LIMIT

HOUR = timedelta(hours=1)


class Placed(Event, type="order.placed"):
    number: int


class Paid(Event, type="order.paid"):
    number: int


@pytest.fixture
def seen():
    return []


@pytest.fixture
def app(database, seen):
    async def orders(message):
        seen.append(message)

    async def audit(message):
        seen.append(message)

    return Resilient(
        database,
        destinations={"orders": orders, "audit": audit},
        routes={Placed: ["orders", "audit"], Paid: ["orders"]},
    )


@pytest.fixture
async def history(app, database, clock, seen):
    """Published an hour apart: two orders placed (to both), then two paid, all of one key; one event waits."""
    for event in (Placed(number=1), Placed(number=2), Paid(number=3), Paid(number=4)):
        with Session(database.sync_engine) as s:
            app.outbox.publish(s, event, key="a")
            s.commit()
        await app.worker().drain(timeout=LIMIT)
        clock.advance(hours=1)
    before = list(seen)
    seen.clear()
    assert len(before) == 6
    return before


async def again(app, seen, **words):
    done = await app.outbox.replay(**words)
    await app.worker().drain(timeout=LIMIT)
    return done, [(m.event["data"]["number"], m.sequence) for m in seen]


async def test_by_time(app, history, seen):
    done, numbers = await again(app, seen, since=2.5 * HOUR)
    assert (done.events, numbers) == (2, [(3, 3), (4, 4)])
    assert [m.id for m in seen] == [m.id for m in history[-2:]]  # consumers tell them by that
    assert not {m.delivery for m in seen} & {m.delivery for m in history}  # brokers must not drop them
    seen.clear()
    assert (await again(app, seen, since=5 * HOUR, until=3.5 * HOUR))[0].events == 2


async def test_by_type_destination_and_key(app, history, seen):
    assert (await again(app, seen, since=9 * HOUR, type="order.paid"))[0].events == 2
    seen.clear()
    done, numbers = await again(app, seen, since=9 * HOUR, destination="audit")
    assert (done.events, numbers) == (2, [(1, 1), (2, 2)])
    assert (await again(app, seen, since=9 * HOUR, key="b"))[0].events == 0


async def test_in_the_order_in_which_they_were_published(app, history, seen, clock):
    await again(app, seen, since=9 * HOUR, destination="orders")
    assert [m.sequence for m in seen] == [1, 2, 3, 4]
    seen.clear()
    clock.advance(hours=1)
    await again(app, seen, since=9 * HOUR, destination="orders")  # the replays of then are not replayed
    assert [m.sequence for m in seen] == [1, 2, 3, 4]


async def test_the_consumer_takes_only_what_it_misses(app, history, seen, database):
    def take(message):
        with Session(database.sync_engine) as s:
            found = app.sync.inbox.first(s, "billing", message.id)
            s.commit()
        return found

    assert [take(m) for m in history[:3]] == [True, False, True]  # the first went to two destinations
    await again(app, seen, since=9 * HOUR, destination="orders")
    assert [take(m) for m in seen] == [False, False, True, True]


async def test_a_dry_run_and_a_limit(app, history, seen, monkeypatch):
    assert app.sync.outbox.replay(since=9 * HOUR, dry_run=True).to_json() == {
        "events": 6, "more": False, "by_destination": {"orders": 4, "audit": 2},
    }  # fmt: skip
    cut = app.sync.outbox.replay(since=9 * HOUR, dry_run=True, limit=3)
    assert (cut.events, cut.more, sum(cut.by_destination.values())) == (3, True, 3)
    monkeypatch.setattr("resilient.engine.events.outbox._BATCH", 2)
    assert (await again(app, seen, since=9 * HOUR, limit=3))[0].by_destination == cut.by_destination
    for limit in (0, -1):
        with pytest.raises(InvalidInput, match="at least 1"):
            await app.outbox.replay(since=HOUR, limit=limit)
    seen.clear()
    assert (await again(app, seen, since=9 * HOUR, until=HOUR / 2))[0].events == 6


async def test_rows_whose_payload_is_no_event_are_not_counted(app, history, seen, database):
    """Something else overwrote them: what is said to be replayed arrives."""
    for number, payload in enumerate(('"x"', "[1]", "{{}}"), 1):
        spoil = f"UPDATE {{job}} SET payload = '{payload}' WHERE resource_key = 'outbox/orders' AND order_no = {number}"
        database.transaction_sync(lambda c, d, spoil=spoil: d.run(c, spoil) and None)
    assert (await app.outbox.replay(since=9 * HOUR, dry_run=True)).by_destination == {"orders": 1, "audit": 2}
    done, numbers = await again(app, seen, since=9 * HOUR)
    assert (done.events, len(numbers)) == (3, 3)


async def test_only_to_destinations_that_are_declared(app, history, seen, database):
    with pytest.raises(InvalidInput, match="'orders2', which is not declared; known are: audit, orders"):
        await app.outbox.replay(since=HOUR, destination="orders2", dry_run=True)
    for asking in (app.outbox.replay(since=HOUR, destination=[]), app.outbox.list(destination=())):
        with pytest.raises(InvalidInput, match=r"destination=\[\] names none"):
            await asking
    later = Resilient(database, destinations={"audit": app.outbox.destinations["audit"]})  # orders was given up
    assert (await later.outbox.replay(since=9 * HOUR)).by_destination == {"audit": 2}
    assert (await Resilient(database).outbox.replay(since=9 * HOUR)).events == 0


async def test_in_batches_nothing_is_left_out_and_nothing_comes_twice(database, clock, monkeypatch):
    """What was enqueued first may have been published last, and what is published meanwhile is not replayed."""
    monkeypatch.setattr("resilient.engine.events.outbox._BATCH", 1)
    errors = [Transient("later", retry_after=3600)]

    async def sink(_message):
        if errors:
            raise errors.pop()

    app = Resilient(database, destinations={"a": sink}, routes={Paid: ["a"]})
    with Session(database.sync_engine) as s:
        for number in (1, 2, 3):
            app.outbox.publish(s, Paid(number=number))
        s.commit()
    await app.worker().drain(timeout=LIMIT)
    clock.advance(hours=2)
    await app.worker().drain(timeout=LIMIT)
    clock.advance(minutes=1)
    replay, later = app.outbox._replay, clock.now() + HOUR

    def meanwhile(c, d, f, words):
        found = replay(c, d, f, words)
        for job in found:  # as if it were another one
            d.run(
                c, "UPDATE {job} SET finished_at = :later WHERE id = :id", {"later": d.time(later), "id": d.id(job.id)}
            )
        return found

    monkeypatch.setattr(app.outbox, "_replay", meanwhile)
    assert (await app.outbox.replay(since=9 * HOUR)).events == 3


@pytest.mark.parametrize("key", ["k", None])
async def test_what_was_published_and_is_retried_by_hand_is_another_delivery(database, clock, key):
    """A broker that drops what it has seen lately would drop it; what failed keeps its name, for that very reason."""
    errors, deliveries = [Transient("no answer"), Permanent("refused")], []

    async def sink(message):
        deliveries.append(message.delivery)
        if errors:
            raise errors.pop(0)

    app = Resilient(database, destinations={"a": sink}, routes={Paid: ["a"]})
    with Session(database.sync_engine) as s:
        app.outbox.publish(s, Paid(number=1), key=key)
        s.commit()
    for _ in range(2):  # the second ends it, dead
        await app.worker().drain(timeout=LIMIT)
        clock.advance(hours=1)
    (job,) = await app.jobs.list(state="dead")
    for _ in range(3):  # published at last, and twice more
        assert (await app.jobs.retry(job.id)).retried == 1
        await app.worker().drain(timeout=LIMIT)
    assert deliveries[:3] == [str(job.id)] * 3
    assert len(set(deliveries)) == 3


async def test_nats_takes_what_was_published_and_is_retried_by_hand(sqlite_url):
    import nats

    server = brokers.NatsServer().start()
    try:
        connection = await nats.connect(server.url)
        stream = connection.jetstream()
        await stream.add_stream(name="ORDERS", subjects=["events.>"])
        app = Resilient(sqlite_url, destinations={"nats": Nats(server.url)}, routes={Paid: ["nats"]})
        with Session(app.database.sync_engine) as s:
            app.outbox.publish(s, Paid(number=1), key="k")
            s.commit()
        for expected in (1, 2):
            await app.worker().drain(timeout=LIMIT)
            assert (await stream.stream_info("ORDERS")).state.messages == expected
            await app.jobs.retry(state="succeeded")
        await app.close()
        await connection.close()
    finally:
        server.close()


async def test_what_was_not_published_is_not_replayed(app, database, seen, clock):
    with Session(database.sync_engine) as s:
        app.outbox.publish(s, Paid(number=1))
        s.commit()
    assert (await app.outbox.replay(since=HOUR)).events == 0


async def test_the_numbers_of_a_key_go_on_however_long_it_was_quiet(app, database, seen):
    """Consumers remember the highest: beginning with 1 again, a new event would be taken for an old one."""

    async def publish(number):
        def write():
            with Session(database.sync_engine) as session:
                app.outbox.publish(session, Paid(number=number), key="k")
                session.commit()

        await asyncio.to_thread(write)
        await app.worker().drain()

    await publish(1)
    await publish(2)
    await database.transaction(lambda c, d: order.prune(c, d, d.now(c) + HOUR))
    await publish(3)
    assert [message.sequence for message in seen] == [1, 2, 3]


async def test_a_dead_event_is_pruned_when_no_replay_waits_for_it_any_more(database, clock):
    """However small the numbers are of those that wait behind it: they would run as if it had never been."""
    seen, refused = [], []

    async def orders(message):
        if message.sequence in refused:
            raise Permanent("no")
        seen.append(message.sequence)

    app = Resilient(
        database, destinations={"orders": orders}, routes={Paid: ["orders"]}, retention=Retention(events=None)
    )
    for number in (1, 2, 3):
        refused.extend({3} & {number})
        with Session(database.sync_engine) as s:
            app.outbox.publish(s, Paid(number=number), key="k")
            s.commit()
        await app.worker().drain(timeout=LIMIT)
        clock.advance(minutes=1)
    assert (await app.outbox.replay(since=HOUR)).events == 2
    await app.worker().drain(timeout=LIMIT)

    async def waiting():
        return [e.sequence for e in await app.outbox.list(order="oldest") if e.state == "blocked"]

    assert await waiting() == [1, 2]
    clock.advance(days=91)
    assert ((await app.prune(dry_run=True)).dead, (await app.prune()).dead) == (0, 0)
    await app.worker().drain(timeout=LIMIT)
    assert (await waiting(), seen) == ([1, 2], [1, 2])
    await app.jobs.cancel(JobFilter(state=("blocked",)))
    assert ((await app.prune(dry_run=True)).dead, (await app.prune()).dead) == (1, 1)


async def test_replays_take_no_numbers_from_new_events(app, database, seen):
    """A consumer that wants every number would wait for theirs for ever."""

    async def publish(*numbers):
        def write():
            with Session(database.sync_engine) as session:
                for number in numbers:
                    app.outbox.publish(session, Paid(number=number), key="k")
                session.commit()

        await asyncio.to_thread(write)

    def take(message):
        with Session(database.sync_engine) as s:
            found = app.sync.inbox.arrived(s, "c", message.id, key="k", number=message.sequence, gapless=True)
            s.commit()
        return found

    await publish(1, 2)
    await app.worker().drain(timeout=LIMIT)
    await publish(3)
    assert (await app.outbox.replay(since=HOUR)).events == 2
    assert (await app.outbox.replay(since=HOUR)).events == 2  # before the others were published
    await publish(4)
    await app.worker().drain(timeout=LIMIT)
    assert [m.sequence for m in seen] == [1, 2, 3, 1, 1, 2, 2, 4]
    assert [take(m) for m in seen] == ["first"] * 3 + ["duplicate"] * 4 + ["first"]
