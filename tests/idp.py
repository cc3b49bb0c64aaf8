"""A real OAuth server on this machine: rotation, single use, expiry, and every way an answer can go wrong."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import threading
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlencode

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from joserfc import jwt
from joserfc.jwk import import_key

from resilient import (
    Basic,
    Bearer,
    Errors,
    FailureKind,
    Job,
    OAuth2,
    Provider,
    Rotation,
    Rule,
    Scope,
    SyncJob,
    handler,
)
from tests.serving import Server


class Idp:
    """Its state, for tests to look at and to bend."""

    def __init__(self):
        self.numbers = itertools.count(1)
        self.access = set()  # good access tokens
        self.refresh = {}  # good refresh tokens, and the one each was made from
        self.rotation = "single_use"  # "none", "grace"
        self.lifetime = 3600
        self.script = []  # what goes wrong with the next requests to the token endpoint
        self.asked = []  # forms that came there
        self.issued = 0
        self.revoked = []  # forms that came to be revoked
        self.calls = []  # (status, authorization) of the API
        self.hold = threading.Event()
        self.hold.set()
        self.crowd = 0  # refusals are not answered before so many wait for one
        self.refusing = 0
        self.secret = "client-secret-canary"
        self.codes = {}  # what consent gave, and what it was given for
        self.refuses = False  # consent
        self.says = {}  # what it answers for some refresh tokens: (status, document)
        self.public = None  # the key that assertions are checked with
        self.claims = []
        self.url = ""

    def issue(self):
        n = next(self.numbers)
        access, refresh = f"canary-access-{n}", f"canary-refresh-{n}"
        self.access.add(access)
        self.refresh[refresh] = None
        return access, refresh

    def expire(self):
        self.access.clear()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        if scope["path"] == "/authorize":
            await self.consent({k: v[0] for k, v in parse_qs(scope["query_string"].decode()).items()}, send)
        elif scope["path"] == "/token":
            form = {k: v[0] for k, v in parse_qs(body.decode()).items()}
            await self.token(form, send)
        elif scope["path"] == "/revoke":
            self.revoked.append({k: v[0] for k, v in parse_qs(body.decode()).items()})
            await answer(send, 200, {})
        else:
            await self.api(dict(scope["headers"]), send)

    async def consent(self, asked, send):
        """A person who says yes at once, or no."""
        answer_ = {"state": asked["state"]}
        if self.refuses:
            answer_ |= {"error": "access_denied", "error_description": "<canary-description>"}
        else:
            answer_["code"] = f"canary-code-{next(self.numbers)}"
            self.codes[answer_["code"]] = (asked["code_challenge"], asked["redirect_uri"])
        to = f"{asked['redirect_uri']}?{urlencode(answer_)}"
        await send({"type": "http.response.start", "status": 302, "headers": [(b"location", to.encode())]})
        await send({"type": "http.response.body"})

    def fits(self, form):
        """A code works once, with the verifier and the address it was given for."""
        if not form["code"].startswith("canary-code-"):
            return True
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        return self.codes.pop(form["code"], None) == (challenge, form["redirect_uri"])

    async def api(self, headers, send):
        said = headers.get(b"authorization", b"").decode()
        good = said.removeprefix("Bearer ") in self.access or said.startswith("Basic ")
        self.calls.append((200 if good else 401, said))
        self.refusing += not good
        deadline = time.monotonic() + 20
        while not good and self.refusing < self.crowd and time.monotonic() < deadline:  # noqa: ASYNC110 - a crowd
            await asyncio.sleep(0.05)
        await answer(send, 200 if good else 401, {"ok": good})

    async def token(self, form, send):  # noqa: PLR0911 - a way to go wrong a line
        self.asked.append(form)
        while not self.hold.is_set():  # noqa: ASYNC110 - the test is in another thread
            await asyncio.sleep(0.01)
        word = self.script.pop(0) if self.script else ""
        if word == "throttle":
            return await answer(send, 429, {"message": "slow down"}, retry_after="120")
        if word == "html":
            return await answer(send, 200, "<html>We are down for maintenance</html>")
        if word == "down":
            return await answer(send, 503, {"message": "canary-message"})
        if (said := self.says.get(form.get("refresh_token"))) is not None:
            return await answer(send, *said)
        if not self.knows(form):
            return await answer(send, 401, {"error": "invalid_client"})
        made = self.granted(form)
        if made is None:
            return await answer(send, 400, {"error": "invalid_grant"})
        self.issued += 1
        if word == "lost":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"500")]})
            return None
        refresh = None if word == "bare" else made[1]
        doc = {"access_token": made[0], "refresh_token": refresh, "expires_in": self.lifetime, "token_type": "bearer"}
        if word == "nulls":
            doc |= {"refresh_token": None, "expires_in": None, "scope": None}
        return await answer(send, 200, doc)

    def knows(self, form):
        """The application by its secret or its assertion; a service account's assertion speaks for itself."""
        signed = form.get("client_assertion") or form.get("assertion")
        if self.public is None or signed is None:
            return form.get("client_secret") == self.secret
        self.claims.append(jwt.decode(signed, self.public, algorithms=["RS256", "ES256"]))
        return "client_secret" not in form

    def granted(self, form):
        if form["grant_type"] != "refresh_token":
            return self.issue() if "code" not in form or self.fits(form) else None
        return self.rotated(form["refresh_token"]) if form["refresh_token"] in self.refresh else None

    def rotated(self, given):
        if self.rotation == "none":
            return self.issue()[0], None
        made = self.issue()
        if self.rotation == "single_use":
            del self.refresh[given]
        else:
            self.refresh = {token: old for token, old in self.refresh.items() if old is None}
            self.refresh[made[1]] = given
        return made

    def provider(self, **changes):
        facts = {
            "authorize_url": f"{self.url}/authorize", "token_url": f"{self.url}/token", "client_id": "app",
            "client_secret": self.secret, "pkce": "required", "rotation": Rotation.SINGLE_USE,
            "redirect_uri": "http://127.0.0.1:1/callback",
        }  # fmt: skip
        rules = (Rule(FailureKind.AUTH, status=401, scope=Scope.ACCOUNT),)
        return Provider(
            name="idp", base_url=self.url, errors=Errors(rules=rules),
            auth=(OAuth2(**{**facts, **changes}), Bearer(), Basic()),
        )  # fmt: skip


async def answer(send, status, doc, *, retry_after=""):
    raw = doc.encode() if isinstance(doc, str) else json.dumps(doc).encode()
    kind = b"text/html" if isinstance(doc, str) else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(raw)).encode())]
    if retry_after:
        headers.append((b"retry-after", retry_after.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


@pytest.fixture
def idp():
    found = Idp()
    with Server(found) as url:
        found.url = url
        yield found
        found.hold.set()


async def connect(app, idp, key="idp/acct-1", *, expired=False, lasts=3600.0, now=None):
    """Connect an account with tokens of its own; those ``expired`` are refreshed before their first use."""
    access, refresh = idp.issue()
    at = (now or datetime.now(UTC)) + timedelta(seconds=-5 if expired else lasts)
    return await app.connections.import_(key, access_token=access, refresh_token=refresh, expires_at=at)


def key_of(idp):
    """The private key of a service account, whose assertions are taken from now on."""
    private = ec.generate_private_key(ec.SECP256R1())
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    idp.public = import_key(pem, "EC")
    return pem


@handler("me")
async def me(job: Job[None]) -> int:
    response = await job.client.get("/me")
    response.raise_for_status()
    return response.status_code


@handler("plain")
def plain(job: SyncJob[None]) -> int:
    response = job.client.get("/me")
    response.raise_for_status()
    return response.status_code
