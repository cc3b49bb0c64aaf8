"""A synchronous Flask application: plain functions, plain sessions, nothing asynchronous in sight.

    python examples/flask_app.py

An order writes its row and enqueues its invoice in one transaction. The worker is a process of its own, as in
production; it needs nothing but the database's address. GitHub calls ``/webhooks/github``; the dashboard
is a command beside it (``resilient --app flask_app:jobs dashboard``), because it needs an ASGI server to be mounted in.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flask import Flask, abort, request
from flask.typing import ResponseReturnValue  # noqa: TC002 - Flask reads annotations
from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlmodel import Field, Session, SQLModel

from providers import github
from resilient import Delivery, Inbound, Resilient, SyncJob, WebhookEvent, handler

URL = os.environ.get("SHOP_DATABASE") or f"sqlite:///{tempfile.mkdtemp()}/shop.db"
GITHUB = os.environ.get("SHOP_GITHUB_SECRET") or secrets.token_urlsafe()
engine = create_engine(URL)


class Order(SQLModel, table=True):
    """A table of the application's own."""

    id: int | None = Field(default=None, primary_key=True)
    item: str
    invoice: str | None = None


class Invoice(BaseModel):
    """The payload of a job."""

    order: int


@handler("invoice.send", timeout=30)
def send_invoice(job: SyncJob[Invoice]) -> str:
    """A plain function: it runs in a thread of the worker. Its row and its success are committed together."""
    number = f"R-{job.payload.order:05}"  # a request to your invoicing service: job.client.post(...)
    with job.complete() as session:
        order = session.get_one(Order, job.payload.order)
        order.invoice = number
    return number


@handler("github.event")
def from_github(job: SyncJob[WebhookEvent]) -> str:
    """What GitHub told: verified, stored and answered before it comes here."""
    return job.payload.event


jobs = Resilient(
    engine,
    handlers=[send_invoice, from_github],
    providers=[github.provider()],
    webhooks=[Inbound(provider="github", secrets=[GITHUB], jobs=from_github)],
    upgrade=True,
)
app = Flask(__name__)


@app.post("/orders")
def place() -> ResponseReturnValue:
    """A row and a job, or neither."""
    with Session(engine, expire_on_commit=False) as session, session.begin():
        order = Order(item=request.form["item"])
        session.add(order)
        session.flush()
        if order.id is None:
            return {"error": "no number"}, 500
        done = jobs.enqueue_sync(send_invoice, Invoice(order=order.id), resource_key="invoices/ours", session=session)
        if order.item == "nothing":
            abort(422)  # too late for the row and the job to exist
    return {"order": order.id, "job": str(done.id)}, 201


@app.post("/webhooks/<provider>")
def hook(provider: str) -> ResponseReturnValue:
    """What a provider calls; the raw body is what it signed."""
    delivery = Delivery(dict(request.headers), request.get_data(), f"https://shop.example/webhooks/{provider}")
    answer = jobs.sync.webhooks.receive(provider, delivery)
    return answer.body, answer.status, dict(answer.headers)


def main() -> None:
    """Place two orders, and see them invoiced by another process."""
    SQLModel.metadata.create_all(engine)
    jobs.ready_sync()  # the engine's own tables; in production: resilient db upgrade
    visitor = app.test_client()
    placed = [visitor.post("/orders", data={"item": item}).get_json() for item in ("chair", "table")]
    command = [sys.executable, "-m", "resilient.surface.cli", "--app", f"{Path(__file__).stem}:jobs", "worker"]
    folder = Path(__file__).parent
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    worker = subprocess.Popen(command, env={**os.environ, "SHOP_DATABASE": URL, "PYTHONPATH": paths})  # noqa: S603
    try:
        while jobs.sync.jobs.count(state=["ready", "scheduled", "running"]):
            time.sleep(0.1)
    finally:
        worker.terminate()
        worker.wait(10)
    for one in placed:
        job = jobs.sync.jobs.get(one["job"])
        with Session(engine) as session:
            print(f"order {one['order']}: {job.state}, invoice {session.get_one(Order, one['order']).invoice}")
    engine.dispose()


if __name__ == "__main__":
    main()
