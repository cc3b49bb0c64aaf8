"""`app.outbox` and `app.inbox` as mypy and pyright see them."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from resilient import (
    Arrival,
    Callback,
    Event,
    EventInfo,
    Kafka,
    Message,
    Nats,
    RabbitMQ,
    RedisStream,
    Replayed,
    Resilient,
    StandardWebhook,
)


class OrderPlaced(Event, type="order.placed", version=2):
    """An event."""

    number: int


async def print_it(message: Message) -> None:
    """A destination."""
    assert_type(message.id, str)
    assert_type(message.sequence, int | None)


app = Resilient(
    "sqlite:///app.db",
    destinations={
        "print": print_it,
        "slowly": Callback(print_it, timeout=60, batch=10, when_dead="skip"),
        "rabbit": RabbitMQ("amqp://localhost/", exchange="orders", routing_key=lambda message: message.type),
        "nats": Nats("nats://localhost", subject="orders.{type}"),
        "redis": RedisStream("redis://localhost", "orders", maxlen=1_000_000),
        "kafka": Kafka(["a:9092", "b:9092"], topic="orders"),
        "customer": StandardWebhook("https://example.com/hook", ["whsec_" + "a" * 32]),
    },
    routes={OrderPlaced: ["rabbit", "customer"]},
    event_source="/shop",
)


async def use(session: AsyncSession, plain: Session) -> None:
    """Both faces have the same types."""
    assert_type(app.outbox.publish(session, OrderPlaced(number=1), key="7"), str)
    assert_type(app.sync.outbox.publish(plain, OrderPlaced(number=1), to=["nats"]), str)
    assert_type(await app.outbox.list(type="order.placed", state=["dead"]), list[EventInfo])
    assert_type(app.sync.outbox.list(destination="rabbit"), list[EventInfo])
    assert_type(await app.outbox.get("id"), list[EventInfo])
    assert_type(await app.outbox.replay(since=timedelta(hours=1)), Replayed)
    assert_type(app.sync.outbox.replay(since=timedelta(hours=1), dry_run=True), Replayed)
    assert_type(await app.inbox.first(session, "billing", "id"), bool)
    assert_type(await app.inbox.arrived(session, "billing", "id", key="7", number=3), Arrival)
    assert_type(app.sync.inbox.arrived(plain, "billing", "id", key="7", number=3, gapless=True), Arrival)
