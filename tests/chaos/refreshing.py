"""Accounts whose tokens end all the time: their providers, where a refresher can be killed, and what must be true then.

Triggers log every step of every grant; the provider logs every exchange (`token_endpoint.py`). `check` holds them
against each other. A refresher was *overtaken* when its lease had ended by the database's own log: because it was
killed, or (on a very slow machine) did not keep it up. Its answer counts for nothing then.

G1 a grant changes only as its table of states says, and nobody is overtaken before the lease ends; G2 the mark is
committed before a request is sent; G3 a second request of an account is sent while one is under way only if that was
overtaken; G4 a refresh token is refused only where each works once, and one that was overtaken had used it; G5 nobody
uses a token before it is stored; G6 an account is marked dead with the provider's word, and only for that.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from dataclasses import dataclass

import history
from token_endpoint import SINGLE_USE

from resilient import Idempotency, OAuth2, Provider, Rotation
from resilient.core.accounts.tokens import TRANSITIONS
from resilient.engine.accounts import grants as engine
from resilient.store.accounts import grants as store
from resilient.wire.oauth.endpoints import TokenClient

LEASE, LAST_CALL = 2.0, 1.0  # seconds; the engine's own are 20 and 5
ROTATIONS = {"grace": Rotation.GRACE, SINGLE_USE: Rotation.SINGLE_USE}
_POSTGRESQL = """
CREATE TABLE grants (n bigserial, at double precision DEFAULT extract(epoch FROM clock_timestamp()), id text, old text,
 new text, fence int, version int, lease double precision, code text);
CREATE FUNCTION log_grants() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
 IF (NEW.state, NEW.version, NEW.fence) IS DISTINCT FROM (OLD.state, OLD.version, OLD.fence) THEN
  INSERT INTO grants (id, old, new, fence, version, lease, code) VALUES (NEW.id::text, OLD.state, NEW.state, NEW.fence,
   NEW.version - OLD.version, extract(epoch FROM OLD.lease_until), NEW.last_code);
 END IF; RETURN NEW; END $$;
CREATE TRIGGER grants AFTER UPDATE ON resilient_grant FOR EACH ROW EXECUTE FUNCTION log_grants();
"""
_SQLITE = """
CREATE TABLE grants (n INTEGER PRIMARY KEY, at REAL DEFAULT ((julianday('now') - 2440587.5) * 86400), id TEXT, old TEXT,
 new TEXT, fence INT, version INT, lease REAL, code TEXT);
CREATE TRIGGER grants_u AFTER UPDATE ON resilient_grant
WHEN NEW.state <> OLD.state OR NEW.version <> OLD.version OR NEW.fence <> OLD.fence BEGIN
 INSERT INTO grants (id, old, new, fence, version, lease, code) VALUES (NEW.id, OLD.state, NEW.state, NEW.fence,
  NEW.version - OLD.version, (julianday(OLD.lease_until) - 2440587.5) * 86400, NEW.last_code); END;
"""


# -- in a worker process -----------------------------------------------------------------------------------------------


def providers(url):
    """One takes the refresh token before the last for a while, the other takes each once."""
    us = {"X-Process": str(os.getpid())}
    made = {
        name: OAuth2(token_url=f"{url}/token", client_id="c", rotation=rotation, token_headers=us)
        for name, rotation in ROTATIONS.items()
    }
    key = Idempotency(header="Idempotency-Key")
    return [Provider(name=name, base_url=url, idempotency=key, auth=(oauth,)) for name, oauth in made.items()]


def hurry():
    """A dead refresher is known as one soon."""
    engine.LEASE, store.LAST_CALL = LEASE, LAST_CALL


def set_points(point):
    """Named steps before, in and after the request to a token endpoint."""
    original = TokenClient.refresh

    async def refresh(self, *args):
        point("refresh", "before")
        asyncio.get_running_loop().call_later(0.02, point, "refresh", "inside")
        answer = await original(self, *args)
        point("refresh", "after")
        return answer

    TokenClient.refresh = refresh


# -- what must be true -------------------------------------------------------------------------------------------------


def install(database):
    """Log every step of every grant from now on."""
    with database.sync_engine.begin() as c:
        if database.is_sqlite:
            c.connection.driver_connection.executescript(_SQLITE)
        else:
            c.exec_driver_sql(_POSTGRESQL)


@dataclass
class Exchange:
    """A request to the token endpoint."""

    begins: float
    process: int
    refresh_token: str
    status: int
    token: str | None
    ends: float = float("inf")


@dataclass
class Account:
    """What happened to one: exchanges and steps in their order, and when a person connected it."""

    exchanges: list[Exchange]
    steps: list
    connected: list[float]

    @property
    def unstored(self):
        """Exchanges whose new tokens never were."""
        return [one for one in self.exchanges if one.status == 200 and self.stored(one) is None]

    def was_overtaken(self, exchange, until):
        """Whether others had given it up by then."""
        gave_up = any(step.new == "unknown" and exchange.begins < step.at <= until for step in self.steps)
        return gave_up and self.stored(exchange) is None

    def stored(self, exchange):
        """When its new token was; None: never. Before the next one asks, or else it was another's."""
        later = [one.begins for one in self.exchanges if one.begins > exchange.begins]
        until = min([*later, *(at for at in self.connected if at > exchange.begins)], default=float("inf"))
        renewals = [step.at for step in self.steps if step.version and exchange.begins <= step.at <= until]
        return renewals[0] if renewals else None


def accounts(database, exchanges):
    """All of them by name."""
    by_name, numbers = defaultdict(lambda: Account([], [], [])), {}
    for line in exchanges:
        of = by_name[line["account"]]
        if line["event"] == "connected":
            of.connected.append(line["t"])
        elif line["event"] == "asked":
            facts = [line[name] for name in ("t", "process", "refresh_token", "status", "token")]
            numbers[line["n"]] = Exchange(*facts)
            of.exchanges.append(numbers[line["n"]])
        else:
            numbers[line["n"]].ends = line["t"]
    bound = history.rows(database, "SELECT grant_id, resource_key FROM resilient_connection")
    names = {str(row.grant_id).replace("-", ""): row.resource_key.partition("/")[2] for row in bound}
    for step in history.rows(database, "SELECT * FROM grants ORDER BY n"):
        by_name[names[step.id.replace("-", "")]].steps.append(step)
    return dict(by_name)


def check(database, provider):
    """The broken rules about credentials, each as one line naming rule and account."""
    uses = defaultdict(list)
    for arrival in provider.arrivals():
        if "token" in arrival:
            uses[arrival["token"]].append(arrival["t"])
    lines = []
    for name, account in accounts(database, provider.exchanges()).items():
        lines += [f"{rule} {name}: {what}" for rule, what in broken(name, account, uses)]
    return lines


_STEPS = {(str(old), str(new)) for (old, _), new in TRANSITIONS.items()}


def broken(name, account, uses):
    """Rules and what breaks them. ``uses``: by access token, when requests came with it."""
    for step in account.steps:
        if (step.old, step.new) not in _STEPS:
            yield "G1", f"{step.old} to {step.new}"
        if step.new == "unknown" and step.lease > step.at:
            yield "G1", f"overtaken {step.lease - step.at:.1f} s before its lease ended"
    for number, one in enumerate(account.exchanges):
        before, earlier = [step for step in account.steps if step.at <= one.begins], account.exchanges[:number]
        if not before or before[-1].new not in ("refreshing", "unknown"):
            yield "G2", f"a request was sent of a grant that was {before[-1].new if before else 'never touched'}"
        if any(other.ends > one.begins and not account.was_overtaken(other, one.begins) for other in earlier):
            yield "G3", "two requests were under way at once"
        users = [other for other in earlier if (other.refresh_token, other.status) == (one.refresh_token, 200)]
        may = name.startswith(SINGLE_USE) and any(account.was_overtaken(other, one.begins) for other in users)
        if one.status != 200 and not may:
            yield "G4", f"{one.refresh_token} was refused, used before by {len(users)}"
        at = account.stored(one)
        if early := [t for t in uses.get(one.token, ()) if at is None or t < at]:
            yield "G5", f"{one.token} was used {len(early)} times before it was stored"
    yield from _deaths(account)


def _deaths(account):
    for step in account.steps:
        if step.new == "needs_reauth" and step.old != step.new:
            before = [one for one in account.exchanges if one.begins < step.at]
            if not before or before[-1].status == 200 or step.code != "invalid_grant":
                yield "G6", f"marked dead with {step.code} after {before[-1].status if before else 'no answer'}"
