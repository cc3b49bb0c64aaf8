"""An order in four steps at four providers: charge, reserve, ship, notify. If one fails, the others are undone.

    python examples/order_pipeline.py

Two orders. The second one's parcel is refused by the carrier: its reservation is released and its charge refunded, in
reverse, and the customer is told so. The providers are fakes on this machine.
"""

from __future__ import annotations

import asyncio
import tempfile

from pydantic import BaseModel

from resilient import Idempotency, Job, Provider, Resilient, handler
from resilient.testing import FakeProvider


class Order(BaseModel):
    """What each step is given."""

    id: str
    amount: int
    country: str


class Charge(BaseModel):
    """What the first step gives to later ones."""

    id: str


@handler("order.charge")
async def charge(job: Job[Order]) -> Charge:
    """Take the money. Stripe takes an idempotency key: a repeat after a crash charges nobody twice."""
    answer = await job.client.post("/v1/charges", data={"amount": str(job.payload.amount), "order": job.payload.id})
    answer.raise_for_status()
    return Charge(id=answer.json()["id"])


@handler("order.refund")
async def refund(job: Job[Order]) -> None:
    """Give it back."""
    charged = await job.result_of(charge)
    (await job.client.post("/v1/refunds", data={"charge": charged.id})).raise_for_status()


@handler("order.reserve")
async def reserve(job: Job[Order]) -> None:
    """Put the goods aside."""
    (await job.client.put(f"/reservations/{job.payload.id}")).raise_for_status()


@handler("order.release")
async def release(job: Job[Order]) -> None:
    """Put them back."""
    (await job.client.delete(f"/reservations/{job.payload.id}")).raise_for_status()


@handler("order.ship")
async def ship(job: Job[Order]) -> None:
    """Hand the parcel to the carrier; a country it does not serve is a 422, and no retry helps."""
    (await job.client.post("/parcels", json=job.payload.model_dump())).raise_for_status()


@handler("order.notify")
async def notify(job: Job[Order]) -> None:
    """Tell the customer."""
    (await job.client.post("/mails", json={"order": job.payload.id, "says": "it is on its way"})).raise_for_status()


async def place(app: Resilient, order: Order) -> str:
    """The whole pipeline, in one transaction. Each step goes through its own provider's gate and limits."""
    async with app.workflow(f"order {order.id}") as wf:
        paid = wf.step(charge, order, resource_key="stripe/shop", undo=refund)
        kept = wf.step(reserve, order, after=paid, resource_key="warehouse/berlin", undo=release)
        sent = wf.step(ship, order, after=kept, resource_key="carrier/shop")
        wf.step(notify, order, after=sent, resource_key="mail/shop")
    return str(wf.id)


async def run(folder: str, stripe: FakeProvider, *others: FakeProvider) -> None:
    """Place two orders and see what becomes of them."""
    app = Resilient(
        f"sqlite:///{folder}/shop.db",
        handlers=[charge, refund, reserve, release, ship, notify],
        providers=[stripe.provider, *(one.provider for one in others)],
    )
    async with app:
        orders = [Order(id="o-1", amount=4900, country="DE"), Order(id="o-2", amount=900, country="AQ")]
        placed = [await place(app, order) for order in orders]
        await app.worker().drain()
        for order, workflow in zip(orders, placed, strict=True):
            info = await app.workflows.get(workflow)
            steps = ", ".join(f"{step.name} {step.state}" for step in info.steps)
            print(f"{order.id}: {info.state} ({steps})")


def carrier(request: object) -> object:
    """Everywhere but to the Antarctic."""
    from resilient.testing.fake import Reply  # noqa: PLC0415 - beside its use

    return Reply(422, {"error": "no service"}) if b'"AQ"' in request.body else Reply(201, {})  # type: ignore[attr-defined]


def main() -> None:
    """Start the providers, run, and look into their logs."""
    keyed = Idempotency()
    with (
        tempfile.TemporaryDirectory() as folder,
        FakeProvider("stripe", anonymous=True) as stripe,
        FakeProvider(Provider(name="warehouse", base_url="https://warehouse.example", idempotency=keyed)) as warehouse,
        FakeProvider(Provider(name="carrier", base_url="https://carrier.example", idempotency=keyed)) as parcels,
        FakeProvider(Provider(name="mail", base_url="https://mail.example", idempotency=keyed)) as mail,
    ):
        stripe.on("POST /v1/charges", {"id": "ch_1"})
        stripe.on("POST /v1/refunds", {"id": "re_1"})
        warehouse.on("PUT /reservations/*", {})
        warehouse.on("DELETE /reservations/*", {})
        parcels.on("POST /parcels", carrier)
        mail.on("POST /mails", {})
        asyncio.run(run(folder, stripe, warehouse, parcels, mail))
        for fake in (stripe, warehouse, parcels, mail):
            print(f"{fake.provider.name}: " + ", ".join(f"{one.method} {one.path}" for one in fake.log.api))


if __name__ == "__main__":
    main()
