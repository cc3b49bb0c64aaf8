"""A database on which every page of the dashboard has something to show, and every action something to do.

What the engine can bring about is brought about by the engine; what takes a provider, minutes or other processes
(grants that died, workers, streams, alerts) is written as rows.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pydantic import BaseModel, Field
from sqlalchemy import text
from sqlalchemy.orm import Session

from resilient import (
    Bearer,
    Event,
    Idempotency,
    Item,
    Job,
    Permanent,
    Provider,
    Resilient,
    Retry,
    Schedule,
    Throttled,
    Transient,
    handler,
)
from resilient.store.accounts.secrets import new_key
from resilient.store.gates import controls
from tests.helpers import drain

KEYS = [new_key()]


class Contact(BaseModel):
    name: str = Field(default="Ada", max_length=80)
    fails: str = ""
    error: str = "no such contact"


@handler("contact.push", retry=Retry(max_attempts=5))
async def push(job: Job[Contact]) -> dict:
    contact = job.payload
    if contact.fails == "permanent":
        raise Permanent(contact.error)
    if contact.fails == "transient":
        raise Transient(contact.error)
    if contact.fails == "throttled":
        raise Throttled(datetime.now(UTC) + timedelta(hours=6))
    return {"pushed": contact.name}


@handler("contacts.sync")
async def sync(job: Job[None]) -> None: ...


@handler("order.charge")
async def charge(job: Job[dict]) -> None: ...


@handler("order.ship")
async def ship(job: Job[dict]) -> None:
    raise Permanent("out of stock")


@handler("order.refund")
async def refund(job: Job[dict]) -> None:
    if job.payload.get("stuck"):
        raise Permanent("the bank refuses")


class OrderPlaced(Event, type="order.placed"):
    order: int


async def deliver(message):
    if message.key == "refused":
        raise Permanent("the search index refuses this document")


def build(url, crm_at="https://crm.example", **options):
    """The program behind the dashboard. ``crm_at``: the address of its CRM."""
    crm = Provider(name="crm", base_url=crm_at, auth=(Bearer(),), idempotency=Idempotency(), whoami="GET /me")
    mail = Provider(name="mail", base_url="https://mail.example", idempotency=Idempotency())
    schedules = [
        Schedule(sync, every="15m", name="nightly", resource_key="crm/acct-1"),
        Schedule(sync, every="1h", name="each-account", for_each="crm/*"),
    ]
    return Resilient(
        url, handlers=[push, sync, charge, ship, refund], providers=[crm, mail], schedules=schedules, secrets=KEYS,
        destinations={"search": deliver, "archive": deliver}, routes={OrderPlaced: ["search"]},
        concurrency={"crm/*": 4}, **options,
    )  # fmt: skip


async def fill(app, say=lambda words: words):
    """Make the world. ``say`` changes every text that a stranger would have written."""
    await app.ready()
    await app.schedules.declare()
    await _accounts(app, say)
    await _jobs(app, say)
    await _work(app, say)
    await _rest(app, say)


async def _accounts(app, say):
    for n in range(12):
        await app.connections.add(f"crm/acct-{n}", token=f"canary-{n}")
        await app.enqueue(push, Contact(), resource_key=f"crm/acct-{n}", tags={"campaign": say("spring")})
    await drain(app)
    for n in (1, 2, 3):
        await app.resources.pause(f"crm/acct-{n}", reason=say("the customer asked"))
    await app.resources.open("mail/acct-1", reason=say("support asked"))
    await app.enqueue(push, Contact(fails="throttled"), resource_key="mail/acct-2")
    await drain(app)
    await app.resources.limit("crm/acct-1", limits=["100/min"], concurrency=3)


async def _jobs(app, say):
    for n in range(60):
        await app.enqueue(push, Contact(), resource_key=f"crm/acct-{1 + n % 3}", priority=n % 7)
    words = say(
        "no such contact: the address ada@example.com is on the list of those who never want to hear of us again"
    )
    for n in range(5):
        await app.enqueue(push, Contact(fails="permanent", error=words), resource_key=f"crm/acct-{5 + n % 2}")
    await app.enqueue(push, Contact(fails="permanent", error="another"), resource_key="mail/acct-3")
    await app.enqueue(push, Contact(fails="transient", error=words), resource_key="crm/acct-5", unique_key="once")
    await drain(app)
    cancelled = await app.enqueue(push, Contact(), resource_key="crm/acct-1")
    await app.jobs.cancel(cancelled.id)


async def _work(app, say):
    async with app.workflow("order", resource_key="crm/acct-1") as wf:
        first = wf.step(charge, {}, name="charge", undo=refund)
        wf.step(sync, None, name="tell", after=[first])
    for name, payload in (("refunded", {}), ("stuck", {"stuck": True})):
        async with app.workflow(name, resource_key="crm/acct-7") as wf:
            first = wf.step(charge, payload, name="charge", undo=refund)
            wf.step(ship, {}, name="ship", after=[first])
    await app.schedules.run("nightly")
    with Session(app.database.sync_engine) as session:
        app.sync.outbox.publish(session, OrderPlaced(order=1), key=say("o-1"))
        app.sync.outbox.publish(session, OrderPlaced(order=2), key="refused")
        session.commit()
    for _ in range(3):
        await drain(app)
    await app.resources.pause("outbox/search", reason="maintenance")
    with Session(app.database.sync_engine) as session:
        app.sync.outbox.publish(session, OrderPlaced(order=3), key="o-3")
        session.commit()


_GRANT = "UPDATE resilient_grant SET state = :state, last_code = :code, failures = 3, died_at = :died"
_GRANT += " WHERE id = (SELECT grant_id FROM resilient_connection WHERE resource_key = :key)"
_WORKER = "INSERT INTO resilient_worker (id, host, pid, kinds, concurrency, running, code_version, started_at, seen_at,"
_WORKER += " stopping, loop_lag) VALUES (:id, 'host', 7, :kinds, 16, 3, '0.1.0', :then, :now, :stopping, 1.4)"
_STREAM = (
    "INSERT INTO resilient_cursor (resource_key, stream, part, position, records, rejected, completed_at, expected,"
)
_STREAM += " error, created_at, updated_at) VALUES (:key, 'people', '', '{}', 4711, 3, :then, 60, :error, :then, :now)"
_DOUBT = "UPDATE resilient_job SET last_error_kind = 'ambiguous', last_error_code = 'no_answer' WHERE id = :id"


async def _rest(app, say):
    now = datetime.now(UTC)
    stamp = {"now": _at(now), "then": _at(now - timedelta(hours=3))}
    dead = await app.jobs.list(state="dead", resource="mail/*")
    rows = [
        *[
            (_GRANT, {"key": f"crm/acct-{n}", "state": "needs_reauth", "code": "invalid_grant", "died": None})
            for n in (8, 9)
        ],
        *[
            (_GRANT, {"key": f"crm/acct-{n}", "state": "suspect", "code": "invalid_grant", "died": stamp["now"]})
            for n in (10, 11)
        ],
        *[
            (_WORKER, {"id": f"host:7:{n}", "kinds": f'["{name}", "contacts.sync"]', "stopping": n == 1, **stamp})
            for n, name in enumerate(["contact.push", "order.charge"])
        ],
        *[(_STREAM, {"key": f"crm/acct-{n}", "error": say("cursor refused") if n else None, **stamp}) for n in (0, 1)],
        (_DOUBT, {"id": dead[0].id.hex}),
    ]

    def write(c, d):
        for statement, values in rows:
            assert c.execute(text(statement), {k: v for k, v in values.items() if f":{k}" in statement}).rowcount == 1

    await app.database.transaction(write)
    for n in (8, 9, 10, 11):
        await app.database.transaction(controls.set_auth, f"crm/acct-{n}", "needs_reauth")
    await app.enqueue_many(push, [Item(Contact(), resource_key=f"crm/acct-{8 + n % 2}") for n in range(9)])
    for n in range(3):
        async with app.audit.change(
            "ann", "resources pause", f"crm/acct-{n}", why=say("asked"), via="dashboard"
        ) as out:
            out["changed"] = 1


def _at(moment):
    return f"{moment:%Y-%m-%d %H:%M:%S.%f}"
