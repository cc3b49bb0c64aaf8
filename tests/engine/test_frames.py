"""What an error tracker collects when the engine fails over credentials: variables of every frame, on real flows."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs

import pytest

from resilient import Bearer, Credentials, Delivery, Inbound, Kind, Provider, Resilient, SetupError, Signature, Webhook
from resilient.core.base.errors import chain
from resilient.core.base.frames import frameless
from resilient.engine.accounts import grants as engine_grants
from resilient.store.accounts import grants
from resilient.store.accounts.secrets import new_key
from tests.idp import connect

A, B = "idp/acct-1", "idp/acct-2"
CANARY = "canary"
BACK = "http://127.0.0.1:1/callback"
KEY = new_key()


def collected(error):
    """Everything a Sentry-like tracker would send of an exception; of the frames, those that are not the program's."""
    found = []
    for one in chain(error):
        found += [str(one), repr(one), repr(getattr(one, "args", "")), repr(getattr(one, "object", ""))]
        found += getattr(one, "__notes__", [])
        trace = one.__traceback__
        while trace is not None:
            if "/tests/" not in trace.tb_frame.f_code.co_filename:
                found += [f"{name}={shown(value)}" for name, value in trace.tb_frame.f_locals.items()]
            trace = trace.tb_next
    return "\n".join(found)


def shown(value, depth=3):
    """As trackers show it: containers and their contents, anything else by its repr."""
    if depth and isinstance(value, dict):
        return " ".join(f"{k!r}: {shown(v, depth - 1)}" for k, v in value.items())
    if depth and type(value) in (list, tuple, set):
        return " ".join(shown(one, depth - 1) for one in value)
    return repr(value)


class Tracker(logging.Handler):
    """Collects the exceptions of log lines."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(f"{record.getMessage()} {record.args!r}")
        if record.exc_info:
            self.texts.append(collected(record.exc_info[1]))


@pytest.fixture
def tracker():
    found = Tracker()
    logging.root.addHandler(found)
    yield found
    logging.root.removeHandler(found)


@pytest.fixture
async def make(database_url, idp):
    made = []

    def make_(**options):
        options = {"secrets": [KEY], "upgrade": False, "providers": [idp.provider()], **options}
        made.append(Resilient(database_url, **options))
        return made[-1]

    yield make_
    for app in made:
        await app.close()


async def failing(asked, match=r"."):
    """What it raises."""
    with pytest.raises(Exception, match=match) as caught:
        await asked
    return caught.value


def check(tracker, *errors):
    for text in (*map(collected, errors), *tracker.texts):
        for secret in (CANARY, KEY, KEY.removeprefix("rsk1_")):
            assert secret not in text


# -- refreshing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["throttle", "html", "down", "lost", "refused"])
async def test_a_token_endpoint_that_fails(make, idp, tracker, word):
    app = make()
    await connect(app, idp, expired=True)
    if word == "refused":
        idp.refresh.clear()
    idp.script = [word] * 5
    check(tracker, await failing(app.credentials(A)))


async def test_credentials_that_cannot_be_sealed(make, idp, tracker, monkeypatch):
    """The key is gone when the new token is to be committed."""
    app = make()
    await connect(app, idp, expired=True)
    monkeypatch.setattr(engine_grants, "COMMITTING", -1.0)
    ring, sealed = app.grants.accounts.ring, app.grants.accounts.encrypt

    def seal(id_, credentials):
        monkeypatch.setattr(ring, "_keys", {})
        return sealed(id_, credentials)

    monkeypatch.setattr(app.grants.accounts, "encrypt", seal)
    error = await failing(app.credentials(A), "there is no key")
    assert idp.issued == 1
    check(tracker, error, await failing(app.connections.add(B, token="canary-token"), "no key"))


async def test_credentials_that_newer_code_wrote(make, idp, tracker, monkeypatch):
    """A field that this code does not know: the mistake is found by its note."""
    app = make()
    await connect(app, idp, expired=True)
    held = await app.grants.accounts.load_usable(A)
    place = ("resilient_grant", held.bound.grant.id.hex, "secrets")
    text = app.grants.accounts.ring.seal('{"token": "canary-a", "of_newer_code": 1}', *place)
    await app.database.transaction(lambda c, d: d.run(c, "UPDATE {grant} SET secrets = :text", {"text": text}))
    app.grants.accounts.forget()
    error = await failing(app.credentials(A), "of_newer_code")
    assert any("access.py" in note for note in error.__notes__)
    check(tracker, error)


@pytest.mark.parametrize("when", ["begin", "renew_if_held"])
async def test_a_database_that_fails_under_a_refresh(make, idp, tracker, monkeypatch, when):
    app = make()
    await connect(app, idp, expired=True)

    def fails(c, d, *_args, **_options):
        return d.run(c, "SELECT nobody_knows_this FROM {grant}")

    monkeypatch.setattr(grants, when, fails)
    monkeypatch.setattr(engine_grants, "COMMITTING", -1.0)
    check(tracker, await failing(app.credentials(A), "nobody_knows_this"))


async def test_a_database_that_is_away_at_the_commit(make, idp, tracker, monkeypatch):
    app = make()
    await connect(app, idp, expired=True)
    monkeypatch.setattr(engine_grants, "COMMITTING", -1.0)
    real = app.database.transaction

    async def away(fn, *args, **kwargs):
        if fn is grants.renew_if_held:
            raise engine_grants.DatabaseUnreachable("away")
        return await real(fn, *args, **kwargs)

    monkeypatch.setattr(app.database, "transaction", away)
    check(tracker, await failing(app.credentials(A), "away"))


async def test_an_apps_own_table_that_fails(make, idp, tracker, monkeypatch):
    class Table:
        async def load(self, _key):
            access, refresh = "canary-a", "canary-b"
            ended = datetime.now(UTC) - timedelta(seconds=5)
            return Credentials(token=access, refresh_token=refresh, expires_at=ended, refresh_at=ended)

        async def save(self, _key, _version, _credentials):
            raise ValueError("cannot be kept")

    monkeypatch.setattr(engine_grants, "COMMITTING", -1.0)
    idp.refresh["canary-b"] = None
    app = make(credentials=Table())
    check(tracker, await failing(app.credentials(A), "cannot be kept"))


async def test_a_question_that_is_cancelled(make, idp, tracker):
    app = make()
    await connect(app, idp, expired=True)
    idp.hold.clear()
    asked = asyncio.create_task(app.credentials(A))
    while not idp.asked:  # noqa: ASYNC110 - the server is in another thread
        await asyncio.sleep(0.01)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await asked
    idp.hold.set()
    check(tracker, caught.value)


# -- connecting ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["async", "sync"])
async def test_calls_that_carry_credentials(make, idp, tracker, monkeypatch, side):
    app = make()
    await connect(app, idp, expired=True)

    async def call(name, *args, **options):
        if side == "async":
            return await getattr(app.connections, name)(*args, **options)
        return await asyncio.to_thread(lambda: getattr(app.sync.connections, name)(*args, **options))

    token, pem = "canary-token", "-----BEGIN PRIVATE KEY-----\ncanary\n-----END PRIVATE KEY-----"
    errors = [
        await failing(call("add", "stranger/a", token=token)),
        await failing(call("add", B, token=token, api_key=token)),
        await failing(call("add", B, token=token + "\n")),
        await failing(call("add", B, user="canary-user", password=b"canary-pw")),
        await failing(call("add", B, private_key=pem, issuer="canary")),
        await failing(call("import_", B, access_token=token, refresh_token=token, expires_at=datetime(2030, 1, 1))),  # noqa: DTZ001
        await failing(call("complete", {"state": "canary", "code": "canary"})),
    ]
    monkeypatch.setattr(grants, "insert_if_new", lambda c, d, *_: d.run(c, "SELECT nobody_knows_this FROM {grant}"))
    errors += [
        await failing(call("add", B, token=token), "nobody_knows_this"),
        await failing(call("import_", B, access_token=token), "nobody_knows_this"),
    ]
    check(tracker, *errors)


@pytest.mark.parametrize("side", ["async", "sync"])
@pytest.mark.parametrize("word", ["html", "down", "lost", ""])
async def test_a_consent_that_comes_to_nothing(make, idp, tracker, side, word):
    app = make()
    if side == "async":
        url = await app.connections.authorize_url(A, redirect_uri=BACK)
    else:
        url = app.sync.connections.authorize_url(A, redirect_uri=BACK)
    state = parse_qs(url.partition("?")[2])["state"][0]
    idp.script = [word] if word else []
    idp.secret = "canary-code" if not word else idp.secret  # the client's is another one
    parameters = {"state": state, "code": "canary-code-9"}
    if side == "async":
        error = await failing(app.connections.complete(parameters))
    else:
        error = await failing(asyncio.to_thread(lambda: app.sync.connections.complete(parameters)))
    check(tracker, error)
    assert state not in collected(error)


# -- keys, addresses, webhooks -------------------------------------------------------------------------------


def test_an_app_that_cannot_be_made(tracker):
    for options in ({"secrets": [KEY, "canary"]}, {"secrets": [KEY], "limits": 3}):
        with pytest.raises(SetupError) as caught:
            Resilient("postgresql://app:canary-pw@127.0.0.1:9/app", **options)
        check(tracker, caught.value)


async def test_a_database_that_cannot_be_reached(tracker):
    app = Resilient("postgresql://app:canary-pw@127.0.0.1:9/app", secrets=[KEY], upgrade=False)
    errors = [
        await failing(app.ready()),
        await failing(app.jobs.count()),
        await failing(asyncio.to_thread(app.sync.jobs.count)),
        await failing(app.connections.add("idp/a", token="canary")),
    ]
    await app.close()
    check(tracker, *errors)


@pytest.mark.parametrize("side", ["async", "sync"])
async def test_a_webhook_that_fails(database_url, tracker, monkeypatch, side):
    secret = "canary-webhook"
    facts = Provider(
        name="acme", base_url="https://acme.example", auth=(Bearer(),),
        webhook=Webhook(signatures=(Signature(header="x-sign"),), delivery="x-id"),
    )  # fmt: skip

    def key_of(event):
        raise ValueError("no key")

    kind = Kind("hooked")
    inbound = Inbound(provider="acme", secrets=lambda _account: [secret], jobs=kind, resource_key=key_of)
    app = Resilient(database_url, upgrade=False, providers=[facts], kinds=[kind], webhooks=[inbound])
    sign = hmac.new(secret.encode(), b"{}", hashlib.sha256).hexdigest()
    delivery = Delivery({"x-sign": sign, "x-id": "1"}, b"{}", "https://our.example")
    if side == "async":
        error = await failing(app.webhooks.receive("acme", delivery), "no key")
    else:
        error = await failing(asyncio.to_thread(lambda: app.sync.webhooks.receive("acme", delivery)), "no key")
    await app.close()
    check(tracker, error)
    assert sign not in collected(error)


# -- the means -----------------------------------------------------------------------------------------------


def test_what_is_being_handled_keeps_its_frames():
    @frameless
    def fails(secret):
        raise ValueError(secret)

    def handles():
        try:
            raise KeyError  # noqa: TRY301 - handled by what calls the other
        except KeyError:
            fails("x")

    with pytest.raises(ValueError, match="x") as caught:
        handles()
    first = caught.value.__context__
    assert isinstance(first, KeyError)
    assert first.__traceback__ is not None
    assert "raised at test_frames.py" in caught.value.__notes__[0]
