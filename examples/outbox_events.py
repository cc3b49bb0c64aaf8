"""Orders and their events in one transaction, published to a webhook and, if there is one, to RabbitMQ.

    python examples/outbox_events.py [amqp://guest:guest@localhost/]

One order is rolled back: nobody hears of it. The webhook refuses the first event it gets: it comes again, and the
others of the same customer wait behind it, so that each customer's events arrive in the order of their commits.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlmodel import Field, SQLModel
from standardwebhooks import Webhook
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from resilient import Event, Fixed, RabbitMQ, Resilient, Retry, StandardWebhook

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

QUEUE = "resilient-example-orders"
SECRET = "whsec_" + base64.b64encode(b"a secret of twenty-four bytes or more").decode()


class Order(SQLModel, table=True):
    """A table of the application's own."""

    id: int | None = Field(default=None, primary_key=True)
    customer: str
    item: str


class OrderPlaced(Event, type="order.placed"):
    """What others are told."""

    order_id: int
    customer: str
    item: str


async def place(app: Resilient, session: AsyncSession, customer: str, item: str) -> None:
    """The row and its event: both, or neither."""
    order = Order(customer=customer, item=item)
    session.add(order)
    await session.flush()
    event = OrderPlaced(order_id=order.id or 0, customer=customer, item=item)
    app.outbox.publish(session, event, key=customer)


async def run(webhook: str, amqp: str | None) -> None:
    """Place orders, publish their events, and say what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/shop.db")
        async with engine.begin() as connection:
            await connection.run_sync(SQLModel.metadata.create_all)
        soon = Retry(max_attempts=None, delay=Fixed(0.2))
        destinations: dict[str, Any] = {"partner": StandardWebhook(webhook, SECRET, allow=["127.0.0.1"], retry=soon)}
        if amqp is not None:
            await declare(amqp)
            destinations["broker"] = RabbitMQ(amqp, routing_key=QUEUE)
        app = Resilient(engine, destinations=destinations, routes={OrderPlaced: list(destinations)}, upgrade=True)
        async with app:
            for customer, item in (("ada", "chair"), ("bob", "lamp"), ("ada", "table"), ("ada", "rug")):
                async with AsyncSession(engine) as session:
                    await place(app, session, customer, item)
                    if item == "table":
                        await session.rollback()  # she changed her mind
                    else:
                        await session.commit()
            worker = app.worker()
            running = asyncio.create_task(worker.run())
            while await app.jobs.count(state=["ready", "scheduled", "running", "blocked"]):  # noqa: ASYNC110 - a script
                await asyncio.sleep(0.05)
            worker.stop()
            await running
            if amqp is not None:
                confirmed = await app.outbox.list(destination="broker", state="succeeded")
                print(f"{len(confirmed)} events confirmed by RabbitMQ")
        await engine.dispose()


async def declare(amqp: str) -> None:
    """Queues are yours to declare: an event that no queue takes counts as not published."""
    import aio_pika  # noqa: PLC0415 - only with a broker

    async with await aio_pika.connect(amqp) as connection, connection.channel() as channel:
        await channel.declare_queue(QUEUE, durable=True)


# -- the partner's webhook -----------------------------------------------------------------------------------


class Partner:
    """Checks signatures; refuses the first event once."""

    def __init__(self) -> None:
        self.accepted: list[dict[str, Any]] = []
        self.refused = 0

    async def take(self, request: Request) -> JSONResponse:
        """Take an event."""
        event = Webhook(SECRET).verify(await request.body(), dict(request.headers))
        if not self.refused:
            self.refused = 1
            return JSONResponse({"error": "try again"}, 503)
        self.accepted.append(event)
        return JSONResponse({}, 202)


@contextmanager
def serving(partner: Partner) -> Iterator[str]:
    """Serve it on a free port of this machine; yields its address."""
    routes = [Route("/events", partner.take, methods=["POST"])]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/events"
    finally:
        server.should_exit = True
        thread.join()


def main(amqp: str | None = None) -> None:
    """Run it."""
    partner = Partner()
    with serving(partner) as address:
        asyncio.run(run(address, amqp))
    for event in sorted(partner.accepted, key=lambda e: str(e["data"]["customer"])):
        print(f"{event['partitionkey']} {int(event['sequence'])}: {event['type']} {event['data']['item']}")
    print(f"{len(partner.accepted)} events accepted, {partner.refused} came again")


if __name__ == "__main__":
    main(*sys.argv[1:2])
