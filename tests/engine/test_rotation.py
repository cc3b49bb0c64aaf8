"""A new key for everything that is stored under the old one, and what is said of the rest."""

from __future__ import annotations

import logging

import pytest
import sqlalchemy as sa

from resilient import Bearer, Job, Kind, Provider, Resilient, Retry, Schedule, SyncJob, handler
from resilient.core.base.errors import SecretsUnreadable
from resilient.engine.accounts import seals
from resilient.engine.ground.sealing import seal
from resilient.store.accounts import secrets
from resilient.store.accounts.secrets import KeyRing, new_key
from resilient.store.db.tables import Base
from tests.helpers import drain

OLD, KEY, LOST = new_key(), new_key(), new_key()
OLD_ID, KEY_ID, LOST_ID = (KeyRing([key]).current for key in (OLD, KEY, LOST))
ONCE_MORE = {
    "resource_key": "bank/1",
    "unique_key": "u",
    "unique_until": "finish",
    "while_running": "once_more",
    "on_conflict": "replace",
}
SEEN: list[str] = []


@handler("pay", sealed=True)
async def pay(job: Job[str]) -> None:
    SEEN.append(job.payload)


@handler("refund", sealed=True)
def refund(job: SyncJob[str]) -> None:
    SEEN.append(f"refund {job.payload}")


@handler("refuse")
async def refuse(job: Job[None]) -> None:
    job.cancel("no")


DAILY = Schedule(pay, "7", every="1d", resource_key="bank/1", name="daily")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    SEEN.clear()
    monkeypatch.setattr(secrets, "WINDOW", 2)


@pytest.fixture
async def make(database_url):
    apps = []

    def make_(*keys, handlers=(pay, refund, refuse), **options):
        apps.append(Resilient(database_url, handlers=list(handlers), secrets=list(keys), **options))
        return apps[-1]

    yield make_
    for app in apps:
        await app.close()


def rows_of(app):
    """Every row, as one text."""
    with app.database.sync_engine.connect() as c:
        return "\n".join(
            str(tuple(row)) for name in Base.metadata.tables for row in c.execute(sa.text(f"SELECT * FROM {name}"))
        )


def told(caplog):
    return [record.message for record in caplog.records if record.name == "resilient.connections"]


async def test_nothing_stays_under_the_old_key(make, caplog):
    """Nine undos of three workflows, in windows of two; and what a running job is to be when it runs once more."""
    old, both, other = make(OLD, kinds=[Kind("again", sealed=True)], schedules=[DAILY]), make(KEY, OLD), make(KEY, OLD)
    await old.schedules.tick()
    for _ in range(3):
        async with old.workflow("flow", resource_key="bank/2") as flow:
            for n in range(3):
                flow.step(pay, f"step {n}", name=f"s{n}", undo=refund)

    @handler("again", sealed=True, retry=Retry(max_attempts=1))
    async def again(job: Job[str]) -> None:
        SEEN.append(job.payload)
        if job.payload == "first":
            await old.enqueue("again", "wish", tags={"of": "x"}, **ONCE_MORE)
            assert await both.connections.rotate_secrets() == 9 + 9 + 2
            assert await other.connections.rotate_secrets() == 0

    await old.enqueue("again", "first", **ONCE_MORE)
    assert OLD_ID in rows_of(old)
    with caplog.at_level(logging.WARNING, "resilient.connections"):
        await drain(make(KEY, OLD, handlers=[again], schedules=[]))
    assert SEEN == ["first", "wish"]
    assert "the payload of 1 schedule is under another key until a worker that declares it starts" in caplog.text
    await make(KEY, schedules=[DAILY]).schedules.tick()
    rows = rows_of(old)
    assert (OLD_ID in rows, KEY_ID in rows) == (False, True)
    caplog.clear()
    assert await make(KEY).connections.rotate_secrets() == 0
    assert told(caplog) == []


async def test_what_no_key_opens_is_told_by_its_key(make, caplog):
    lost = make(LOST)
    for app in (lost, make(OLD), lost):
        async with app.workflow("flow", resource_key="bank/2") as flow:
            flow.step(pay, "x", undo=refund)
    assert await make(KEY, OLD).connections.rotate_secrets() == 2
    assert f"4 sealed payloads no key given here opens, and stay so (4 under {LOST_ID})" in caplog.text


@pytest.mark.parametrize("times", [1, 9])
async def test_what_changes_meanwhile_is_walked_over_again(make, monkeypatch, caplog, times):
    await make(OLD).enqueue(pay, "first", resource_key="bank/1")
    real, left = seals.reseal_payload, list(range(times))

    def reseal(c, d, ring, row):
        if left:  # an edit by a process that has the old key in front comes between
            text = seal(KeyRing([OLD]), "pay", f'"edit {left.pop()}"')
            assert secrets.write_sealed(c, d, row, text)
        return real(c, d, ring, row)

    monkeypatch.setattr(seals, "reseal_payload", reseal)
    assert await make(KEY, OLD).connections.rotate_secrets() == (1 if times == 1 else 0)
    assert ("1 sealed payload changed meanwhile: rotate again" in caplog.text) is (times > 1)
    await drain(make(KEY, *([OLD] if times > 1 else [])))
    assert SEEN[0].startswith("edit")


async def test_a_tag_that_has_those_words_is_no_payload(make, caplog):
    app, both = make(OLD, kinds=[Kind("again")]), make(KEY, OLD)

    @handler("again", retry=Retry(max_attempts=1))
    async def again(job: Job[str]) -> None:
        if job.payload == "first":
            await app.enqueue("again", "second", tags={"of": '{"resilient:sealed":"x"}'}, **ONCE_MORE)
            assert await both.connections.rotate_secrets() == 0

    await app.enqueue("again", "first", **ONCE_MORE)
    await drain(make(KEY, handlers=[again]))
    assert told(caplog) == []


STEPS = ([OLD], [OLD, KEY], [KEY, OLD], [KEY])
CRM = Provider(name="crm", base_url="https://crm.example", auth=(Bearer(),))


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_processes_of_two_steps_of_a_new_key_read_what_the_other_writes(make, step):
    """As `docs/operating.md` has it: the new one as the last everywhere, then in front everywhere, then alone."""
    before, after = (make(*STEPS[n], providers=[CRM]) for n in (step - 1, step))
    await make(*STEPS[step - 1], providers=[CRM]).connections.add("crm/0", token="t")
    await before.connections.rotate_secrets()
    assert (await after.credentials("crm/0")).token == "t"
    for n, (writer, reader) in enumerate([(before, after), (after, before)]):
        await writer.connections.add(f"crm/{n + 1}", token=f"token {n}")
        assert (await reader.credentials(f"crm/{n + 1}")).token == f"token {n}"
        await writer.enqueue(pay, f"job {n}", resource_key="bank/1")
        await drain(reader)
    assert SEEN == ["job 0", "job 1"]


def test_who_lacks_a_key_is_told_of_the_steps():
    sealed = KeyRing([KEY]).seal("x", "grant", "1", "secrets")
    with pytest.raises(SecretsUnreadable, match=r"given as the last, then in front, then .resilient secrets rotate"):
        KeyRing([OLD]).open(sealed, "grant", "1", "secrets")


PLAIN = {
    "alert": "detail",
    "attempt": "message traceback",
    "audit": "action outcome subject via who why",
    "connection": "details",
    "cursor": "error position",
    "job": "last_error progress result sent tags trace",
    "resource": "last_error learnt paused_reason policy window",
    "step": "after_names",
    "worker": "kinds resources",
    "workflow": "reason",
}


def test_every_column_that_holds_texts_is_rotated_or_named():
    """A new one is to be rotated (`secrets.ROTATED`), or named there or here with those that are not."""
    sealed, plain = {*secrets.ROTATED, *secrets.NOT_ROTATED}, {(t, c) for t, cs in PLAIN.items() for c in cs.split()}
    found = {
        (table.name.removeprefix("resilient_"), column.name)
        for table in Base.metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, sa.JSON | sa.Text)
    }
    assert found - sealed - plain == set()
    assert (plain | sealed) - found == set()
    assert sealed & plain == set()
