"""Charge customers with Stripe's own SDK, which speaks through requests, from jobs.

    python examples/stripe_sdk.py

The SDK gets a session of the job's: it carries the account's key and an idempotency key that stays the same however
often the job runs, waits when Stripe says so, and what the SDK raises is understood. Stripe is played by the test kit
on this machine: it says "slow down" once, and once it charges but its answer gets lost.
"""

from __future__ import annotations

import asyncio
import tempfile

import stripe
from pydantic import BaseModel

from resilient import Resilient, Retry, SyncJob, handler
from resilient.adapters.requests import session
from resilient.testing import FakeClock, FakeProvider, Seen, new_key

# -- what you write ------------------------------------------------------------------------------------------


class Charge(BaseModel):
    """The payload of a job."""

    customer: str
    amount: int


@handler("charge", retry=Retry(max_attempts=5), timeout=60)
def charge(job: SyncJob[Charge]) -> str:
    """One payment. Nothing is caught, nothing is tried again here, and no key is made up."""
    with session(job) as http:
        client = stripe.StripeClient(
            "the connection has it",
            http_client=stripe.RequestsClient(session=http),
            max_network_retries=0,
            base_addresses={"api": job.deps},  # only because Stripe is on this machine
        )
        made = client.v1.payment_intents.create(
            {"customer": job.payload.customer, "amount": job.payload.amount, "currency": "eur"}
        )
    return made.id


# -- the run -------------------------------------------------------------------------------------------------


def intent(request: Seen) -> dict[str, str]:
    """What Stripe answers."""
    return {"object": "payment_intent", "id": f"pi_{request.idempotency_key}"}


async def main() -> None:
    clock = FakeClock()
    with tempfile.TemporaryDirectory() as folder, FakeProvider("stripe", clock=clock.now) as fake:
        fake.on("POST /v1/payment_intents", intent)
        fake.fail_next("lost")
        app = Resilient(
            f"sqlite:///{folder}/jobs.db", handlers=[charge], providers=[fake.provider], clock=clock.now,
            secrets=[new_key()], deps=fake.url,
        )  # fmt: skip
        async with app:
            await app.connections.add("stripe/acct-1", token=fake.account("acct-1").access_token)
            for number in range(5):
                await app.enqueue(charge, Charge(customer=f"cus_{number}", amount=100), resource_key="stripe/acct-1")
            await app.worker(concurrency=1).drain()
            fake.throttle(for_=60)
            for _ in range(10):  # time passes
                clock.advance(30)
                await app.worker(concurrency=1).drain()
        throttled = len(fake.log.where(status=429))
        lost = len(fake.log.where(status=None))
        twice = "none twice" if fake.duplicates == 0 else f"{fake.duplicates} twice"
        paid = len(fake.performed)
        print(f"{paid} payments, {twice}; answers lost: {lost}; 'slow down': {throttled}, ignored: {fake.early}")


if __name__ == "__main__":
    asyncio.run(main())
