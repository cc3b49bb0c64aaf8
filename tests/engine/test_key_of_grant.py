"""A key that lives with the grant it was sent with: a refresh leaves it, a new login ends it, and nothing is doubled.

The provider is Matrix's fake, which knows an event's id by its device alone: a repeat after a new login makes a second.
"""

from __future__ import annotations

import httpx
import pytest

from resilient import Credentials, Fixed, Idempotency, InvalidInput, Job, Resilient, Retry, SyncJob, handler
from resilient.store.db.dialect import JSON
from resilient.testing import FakeProvider, new_key
from tests.helpers import drain

KEY = new_key()
ACCOUNT = "matrix/ada"
HOME = {"homeserver": "matrix.example"}
AGAIN = Retry(max_attempts=9, delay=Fixed(60))


def place(job):
    return f"/rooms/!a:b/send/m.room.message/{job.idempotency_key}"


def sending(**options):
    @handler("send", retry=AGAIN, **options)
    async def send(job: Job[None]) -> None:
        (await job.client.put(place(job), json={"body": "hello"})).raise_for_status()

    return send


def calling():
    """A vendor's client in a thread."""

    @handler("call", retry=AGAIN)
    def call(job: SyncJob[None]) -> None:
        with job.call("PUT", place(job)) as call:
            answer = httpx.put(call.url, headers=call.headers, json={"body": "hello"})
            call.report(answer.status_code, answer.headers, answer.text)
        call.raise_for_failure()

    return call


class Store:
    """An app's own table of tokens."""

    def __init__(self, account, version=1):
        self.put(account, version)

    def put(self, account, version):
        self.found = Credentials(
            token=account.access_token, refresh_token=account.refresh_token, values=HOME, version=version
        )

    async def load(self, _key):
        return self.found

    async def save(self, _key, expected_version, credentials):
        if expected_version != self.found.version:
            return False
        self.found = credentials
        return True


@pytest.fixture
def fake(clock):
    with FakeProvider("matrix", clock=clock.now) as made:
        made.on("PUT */send/*", {"event_id": "$1"})
        yield made


@pytest.fixture
async def make(fake, database_url, clock):
    made = []

    def make(*handlers, provider=None, **options):
        app = Resilient(
            database_url, handlers=handlers, providers=[provider or fake.provider], upgrade=False, clock=clock.now,
            secrets=[KEY], **options,
        )  # fmt: skip
        made.append(app)
        return app

    yield make
    for app in made:
        await app.close()


async def connect(app, account):
    await app.connections.import_(ACCOUNT, **account.tokens, details=HOME)


async def log_in(app, fake, clock):
    """The customer did, a while later."""
    clock.advance(61)
    await connect(app, fake.authorize("ada"))


async def mark(app):
    (row,) = await app.database.transaction(lambda c, d: d.run(c, "SELECT sent FROM {job}", sent=JSON).all())
    (found,) = row[0].values()
    return found


async def lose(fake, app, kind):
    """A job whose event was made, and whose answer was lost."""
    fake.fail_next("cut", times=99)
    done = await app.enqueue(kind, resource_key=ACCOUNT)
    await drain(app)
    fake.up()
    job = await app.jobs.get(done.id)
    assert (job.state, job.last_error_kind, len(fake.performed)) == ("scheduled", "transient", 1)
    return done.id


@pytest.mark.parametrize("make_handler", [sending, calling], ids=["client", "call"])
async def test_the_same_grant_repeats_with_the_same_key_also_after_a_refresh(make, fake, clock, make_handler):
    send = make_handler()
    app = make(send)
    await connect(app, fake.account("ada"))
    id_ = await lose(fake, app, send)
    known = await mark(app)
    assert known["key"] == str(id_)
    fake.expire_tokens()
    clock.advance(61)
    await drain(app)
    assert (await app.jobs.get(id_)).state == "succeeded"
    assert (fake.account("ada").refreshes, len(fake.performed), fake.log[-1].replayed) == (1, 1, True)
    assert {one.idempotency_key for one in fake.log.api} == {str(id_)}


@pytest.mark.parametrize("make_handler", [sending, calling], ids=["client", "call"])
async def test_after_a_new_login_it_is_shown_to_a_person(make, fake, clock, make_handler):
    send = make_handler()
    app = make(send)
    await connect(app, fake.account("ada"))
    id_ = await lose(fake, app, send)
    sent = len(fake.log.api)
    await log_in(app, fake, clock)
    await drain(app)
    job = await app.jobs.get(id_)
    assert (job.state, job.last_error_kind, len(fake.log.api)) == ("dead", "ambiguous", sent)
    assert "unknown outcome" in job.last_error
    assert "was first sent at 2030-01-01 12:00:00 UTC, and its account was connected anew since" in job.last_error
    assert (await app.jobs.retry(id_)).ambiguous == 1  # a person has to say that it may be done twice
    await app.jobs.retry(id_, repeat_ambiguous=True)
    await drain(app)
    assert ((await app.jobs.get(id_)).state, len(fake.performed)) == ("succeeded", 2)


@pytest.mark.parametrize(
    ("found", "state", "events"), [(True, "succeeded", 1), (False, "succeeded", 2), (None, "dead", 1)]
)
async def test_after_a_new_login_it_is_looked_up(make, fake, clock, found, state, events):
    looks = []

    async def look(job: Job[None]) -> bool | None:
        looks.append(job.execution)
        return found

    send = sending(reconcile=look)
    app = make(send)
    await connect(app, fake.account("ada"))
    id_ = await lose(fake, app, send)
    await log_in(app, fake, clock)
    for _ in range(3):
        clock.advance(61)
        await drain(app)
    assert ((await app.jobs.get(id_)).state, len(looks), len(fake.performed)) == (state, 1, events)


async def test_a_dead_grant_between_the_sending_and_its_repeat(make, fake, clock):
    """The whole story: no answer, then the token is refused for good, then the customer logs in anew."""
    send = sending()
    app = make(send)
    await connect(app, fake.account("ada"))
    id_ = await lose(fake, app, send)
    fake.revoke("ada")
    clock.advance(61)
    await drain(app)
    assert (await app.connections.get(ACCOUNT)).state == "needs_reauth"
    assert (await app.jobs.get(id_)).state == "ready"  # it waits for its account
    await log_in(app, fake, clock)
    await drain(app)
    job = await app.jobs.get(id_)
    assert (job.state, job.last_error_kind, len(fake.performed)) == ("dead", "ambiguous", 1)


async def test_what_was_refused_goes_out_under_the_new_login(make, fake, clock):
    """A refusal of the first sending leaves nothing open."""
    send = sending()
    app = make(send)
    await connect(app, fake.account("ada"))
    fake.revoke("ada")
    done = await app.enqueue(send, resource_key=ACCOUNT)
    await drain(app)
    await log_in(app, fake, clock)
    await drain(app)
    assert ((await app.jobs.get(done.id)).state, len(fake.performed)) == ("succeeded", 1)


async def test_a_new_login_of_another_grant(make, fake, clock):
    """The account shares another one's grant from now on."""
    send = sending()
    app = make(send)
    await connect(app, fake.account("ada"))
    await app.connections.import_("matrix/team", **fake.account("team").tokens, details=HOME)
    id_ = await lose(fake, app, send)
    await app.connections.add(ACCOUNT, grant_of="matrix/team", details=HOME)
    clock.advance(61)
    await drain(app)
    job = await app.jobs.get(id_)
    assert (job.state, job.last_error_kind, len(fake.performed)) == ("dead", "ambiguous", 1)


async def test_a_login_within_one_execution(make, fake, clock):
    """The last line: a handler that repeats by itself."""
    sent = []

    @handler("twice", retry=Retry(max_attempts=1))
    async def twice(job: Job[None]) -> None:
        for _ in range(2):
            try:
                await job.client.put(place(job), json={})
            except Exception:  # noqa: BLE001 - whatever it is, the handler goes on
                sent.append(len(fake.log.api))
                await log_in(app, fake, clock)

    app = make(twice)
    await connect(app, fake.account("ada"))
    fake.fail_next("cut", times=99)
    await app.enqueue(twice, resource_key=ACCOUNT)
    await drain(app)
    assert len(sent) == 2
    assert sent[0] == sent[1] == len(fake.log.api)


async def test_a_grant_in_the_apps_own_table(make, fake, clock):
    """A refresh is told by nobody, a new login by `connections.restored`."""
    send = sending()
    store = Store(fake.account("ada"))
    app = make(send, credentials=store)
    first = await lose(fake, app, send)
    fake.expire_tokens()
    clock.advance(61)
    await drain(app)
    assert ((await app.jobs.get(first)).state, store.found.version, len(fake.performed)) == ("succeeded", 2, 1)

    fake.log.clear()
    fake.fail_next("cut", times=99)
    second = await app.enqueue(send, resource_key=ACCOUNT)
    await drain(app)
    fake.up()
    clock.advance(61)
    store.put(fake.authorize("ada"), 3)
    await app.connections.restored(ACCOUNT)
    await drain(app)
    job = await app.jobs.get(second.id)
    assert (job.state, job.last_error_kind, len(fake.performed)) == ("dead", "ambiguous", 2)


async def test_a_key_that_no_time_ends(make, fake, clock):
    send = sending()
    forever = Idempotency(in_path=True, methods=frozenset({"PUT"}), paths=("*/send/*",), lives_with="grant")
    provider = fake.provider.configured(idempotency=forever)
    app = make(send, provider=provider)
    await connect(app, fake.account("ada"))
    id_ = await lose(fake, app, send)
    assert (await mark(app))["until"].startswith("9999-12-31")
    clock.advance(days=3000)
    await drain(app)
    assert (await app.jobs.get(id_)).state == "succeeded"


async def test_a_day_later_synapse_has_forgotten_it(make, fake, clock):
    send = sending()
    app = make(send)
    await connect(app, fake.account("ada"))
    id_ = await lose(fake, app, send)
    clock.advance(days=1)
    await drain(app)
    job = await app.jobs.get(id_)
    assert (job.state, job.last_error_kind, len(fake.performed)) == ("dead", "ambiguous", 1)
    assert "remembers its key only until 2030-01-02 11:59:00 UTC" in job.last_error


async def test_a_key_of_the_callers_is_refused_where_it_cannot_be_carried(make, fake):
    refused = []

    @handler("own")
    async def own(job: Job[None]) -> None:
        try:
            await job.client.put(place(job), extensions={"idempotency_key": "mine"})
        except InvalidInput as error:
            refused.append(str(error))

    app = make(own)
    await connect(app, fake.account("ada"))
    await app.enqueue(own, resource_key=ACCOUNT)
    await drain(app)
    assert len(refused) == 1
    assert "takes it as the last segment of the path" in refused[0]
    assert not fake.log.api


async def test_a_path_key_is_in_no_header(make, fake):
    send = sending()
    app = make(send)
    await connect(app, fake.account("ada"))
    done = await app.enqueue(send, resource_key=ACCOUNT)
    await drain(app)
    (seen,) = fake.log.api
    assert "idempotency-key" not in seen.headers
    assert (seen.query, seen.idempotency_key) == ({}, str(done.id))
