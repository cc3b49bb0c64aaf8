"""The shop's jobs, and the app that runs them: ``RESILIENT["APP"]`` names `make`."""

from __future__ import annotations

from pydantic import BaseModel

import resilient.django
from resilient import Resilient, SyncJob, handler
from shop.models import Order


class Invoice(BaseModel):
    """The payload of a job."""

    order: int


@handler("invoice.send", timeout=30)
def send_invoice(job: SyncJob[Invoice]) -> str:
    """Run by a worker, in a thread, where models work as in a view.

    Should the worker die between the save and the job's end, it runs again: so it writes the same again.
    """
    number = f"R-{job.payload.order:05}"  # a request to your invoicing service: job.client.post(...)
    Order.objects.filter(pk=job.payload.order).update(invoice=number)
    return number


def make() -> Resilient:
    """A function, so that a test run gets an app on its test database."""
    return Resilient(resilient.django.address(), handlers=[send_invoice])
