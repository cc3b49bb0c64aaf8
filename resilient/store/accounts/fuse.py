"""Deaths of grants, and the fuse that holds them back when there are too many (`core.accounts.fuse`).

Deaths of one provider's grants are counted under one lock (`hold`), so that of many at the same moment each sees those
before it. Lock order: that lock, grants by id, their accounts by key, the provider.

A `DeathListener` is called in the same transaction: it alerts people, and lets the app's own jobs know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from resilient.core.accounts import fuse
from resilient.core.accounts.fuse import APP_REFUSED, SUSPECT_AUTH, WINDOW
from resilient.core.accounts.tokens import LATELY, USABLE, GrantEvent, GrantState, after
from resilient.store import alerts
from resilient.store.accounts import grants
from resilient.store.db.dialect import ID, TIME
from resilient.store.gates import controls as gates
from resilient.store.schedules import ticks as schedules

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.accounts.grants import Grant
    from resilient.store.db.dialect import Dialect

_WELL: Final = ", ".join(f"'{state.value}'" for state in sorted(USABLE))
_ALL: Final = 1_000_000_000


class DeathListener(Protocol):
    """What is called in the transaction in which accounts come to need a person."""

    def tell(self, c: Connection, d: Dialect, dead: Sequence[Grant]) -> None:
        """Say that the accounts of these grants need a person."""

    def hush(self, c: Connection, d: Dialect, provider: str, keys: Sequence[str]) -> None:
        """Take back what was not sent yet of the deaths of these accounts of a provider."""


@dataclass(frozen=True, slots=True)
class Death:
    """The outcome for a grant: its row as it is then, and whether this call made it die, and the fuse blow."""

    grant: Grant | None
    died: bool = False
    blown: bool = False


def hold(c: Connection, d: Dialect, provider: str) -> None:
    """Lock the judging of this provider's grants until the transaction ends."""
    schedules.hold(c, d, chore(provider))


def notices_of(provider: str) -> str:
    """The resource of the app's jobs that tell the customers of a provider's dead accounts."""
    return f"connections/{provider}"


def chore(provider: str) -> str:
    """The name of the chore that probes a provider's credentials."""
    return f"engine:credentials:{provider}"


def die_if_held(c: Connection, d: Dialect, before: Grant, code: str | None, listener: DeathListener) -> Death:
    """Declare the grant of a refresh dead, unless its row changed since the refresh began (``before``)."""
    hold(c, d, before.provider)
    grant = grants.lock(c, d, before.id)
    if grant is None or (grant.version, grant.fence) != (before.version, before.fence):
        return Death(grant)
    return _die(c, d, grant, code, listener)


def die_if_version(
    c: Connection, d: Dialect, before: Grant, code: str | None, listener: DeathListener, *, certain: bool = False
) -> Death:
    """Declare a grant dead whose credentials are refused though fresh, or not renewable, unless its row changed.

    ``certain``: no provider said so, the token's own end has come. Such a death is not counted, and never doubted.
    """
    hold(c, d, before.provider)
    grant = grants.lock(c, d, before.id)
    if grant is None or grant.version != before.version or grant.state is GrantState.REFRESHING:
        return Death(grant)
    return _die(c, d, grant, code, listener, certain=certain)


def suspects(c: Connection, d: Dialect, provider: str) -> list[UUID]:
    """Grants whose death is in doubt, the latest first."""
    rows = d.run(
        c,
        "SELECT id FROM {grant} WHERE provider = :provider AND died_at IS NOT NULL AND state = 'suspect'"
        " ORDER BY died_at DESC, id",
        {"provider": provider},
        id=ID,
    )
    return list(rows.scalars())


def can_be_asked(c: Connection, d: Dialect, provider: str) -> bool:
    """Whether some suspect can be refreshed as a probe."""
    row = d.run(
        c,
        "SELECT 1 FROM {grant} WHERE provider = :provider AND died_at IS NOT NULL AND state = 'suspect'"
        " AND kind = 'oauth2' LIMIT 1",
        {"provider": provider},
    )
    return row.first() is not None


def well(c: Connection, d: Dialect, provider: str) -> list[UUID]:
    """A few grants that are not in doubt and may be refreshed: those that worked last, as they are likely alive."""
    rows = d.run(
        c,
        f"SELECT id FROM {{grant}} WHERE provider = :provider AND state IN ({_WELL}) AND died_at IS NULL"
        " AND kind = 'oauth2' ORDER BY coalesce(worked_at, refreshed_at) DESC NULLS LAST, id LIMIT 5",
        {"provider": provider},
        id=ID,
    )
    return list(rows.scalars())


def note_accepted(c: Connection, d: Dialect, provider: str) -> None:
    """The provider accepted our client: open its gate, if it was shut because the client was refused."""
    gates.open_auth(c, d, provider, APP_REFUSED)


@dataclass(frozen=True, slots=True)
class Standing:
    """The evidence about the application at its provider, after one of its grants was refused.

    ``credible``: that grant has worked, or none ever has; ``others``: how many credible ones were refused since the
    application was last accepted; ``accepted_lately``: it was accepted a moment ago; ``witnesses``: grants that are
    well and can be probed.
    """

    credible: bool
    others: int
    accepted_lately: bool
    witnesses: Sequence[UUID]


def standing(c: Connection, d: Dialect, grant: Grant) -> Standing:
    """Read the evidence for and against the application; see `core.accounts.tokens`."""
    now, params = d.now(c), {"provider": grant.provider, "grant_id": d.id(grant.id)}
    others = "FROM {grant} WHERE provider = :provider AND id <> :grant_id"
    worked = "(worked_at IS NOT NULL OR refreshed_at IS NOT NULL)"
    latest = d.run(
        c, f"SELECT max(refreshed_at) AS refreshed, max(died_at) AS died {others}", params, refreshed=TIME, died=TIME
    ).one()
    last = max((at for at in latest if at is not None), default=None)
    alone = d.run(c, f"SELECT 1 {others} AND {worked} LIMIT 1", params).first() is None
    since = now - WINDOW if last is None else max(now - WINDOW, last)
    refused = d.run(
        c,
        f"SELECT count(*) {others} AND client_refused_at > :since_at" + ("" if alone else f" AND {worked}"),
        {**params, "since_at": since},
    ).scalar_one()
    rows = d.run(
        c,
        f"SELECT id {others} AND {worked} AND state IN ({_WELL}) AND died_at IS NULL AND kind = 'oauth2'"
        " AND coalesce(flow, '') <> 'jwt_bearer' AND (client_refused_at IS NULL OR client_refused_at <= :since_at)"
        " ORDER BY coalesce(worked_at, refreshed_at) DESC, id LIMIT 3",
        {**params, "since_at": since},
        id=ID,
    )
    accepted_lately = last is not None and now - last < LATELY
    return Standing(grant.has_worked or alone, int(refused), accepted_lately, list(rows.scalars()))


def release(c: Connection, d: Dialect, provider: str, *, believed: bool = True) -> list[Grant]:
    """Clear the suspects of a provider that erred, and open its gate; returns them.

    Unless they are ``believed``, who is refused once more before they worked again dies without a doubt.
    """
    return _decide(c, d, provider, GrantEvent.CLEARED, believed=believed)


def confirm(c: Connection, d: Dialect, provider: str, listener: DeathListener) -> list[Grant]:
    """Declare the suspects dead: their accounts wait for people, the listener is called, the provider's gate opens."""
    dead = _decide(c, d, provider, GrantEvent.DIED)
    listener.tell(c, d, dead)
    return dead


# -- inside --------------------------------------------------------------------------------------------------


def _die(
    c: Connection, d: Dialect, grant: Grant, code: str | None, listener: DeathListener, *, certain: bool = False
) -> Death:
    now = d.now(c)
    shut = gates.auth_of(c, d, grant.provider) == SUSPECT_AUTH
    counts = (
        not certain and grant.has_worked and (grant.doubted_at is None or grant.died_at is not None)
    )  # a probe changes nothing
    doubted = counts and (shut or _blows(c, d, grant, now))
    died_at, doubted_at = now if counts else None, now if doubted else grant.doubted_at
    state = after(grant.state, GrantEvent.DOUBTED if doubted else GrantEvent.DIED)
    if state is None:
        return Death(grant)
    grant = replace(
        grant, state=state, state_since=now, last_code=code, died_at=died_at, lease_until=None, sent_at=None
    )
    grants.write(
        c, d, grant.id, now,
        state=state.value, state_since=now, last_code=code, died_at=died_at, lease_until=None, sent_at=None,
        retry_at=None, doubted_at=doubted_at,
    )  # fmt: skip
    if not doubted:
        grants.gate(c, d, grant.id, state.value)
        listener.tell(c, d, [grant])
    elif not shut:
        listener.hush(c, d, grant.provider, _hold_back(c, d, grant.provider, now))
        gates.set_auth(c, d, grant.provider, SUSPECT_AUTH)
    return Death(grant, died=True, blown=doubted and not shut)


def _blows(c: Connection, d: Dialect, grant: Grant, now: datetime) -> bool:
    """Whether this death is one too many; most of the time that costs one look into a small index."""
    dead = 1 + _count(c, d, "died_at > :died_since AND id <> :grant_id", _ALL, grant, died_since=now - WINDOW)
    if not fuse.blows(dead, 0):
        return False
    return fuse.blows(dead, _count(c, d, f"state IN ({_WELL}) AND id <> :grant_id", fuse.count_limit(dead), grant))


def _count(c: Connection, d: Dialect, which: str, most: int, grant: Grant, **params: datetime) -> int:
    number = d.run(
        c,
        f"SELECT count(*) FROM (SELECT 1 FROM {{grant}} WHERE provider = :provider AND {which} LIMIT :most) AS found",
        {"provider": grant.provider, "grant_id": d.id(grant.id), "most": most, **params},
    ).scalar_one()
    return int(number)


def _hold_back(c: Connection, d: Dialect, provider: str, now: datetime) -> list[str]:
    """Put grants that died just before in doubt too, and withdraw their alerts as far as nobody got them.

    Returns their accounts. Those that died earlier, or without a doubt, are dead still.
    """
    marked = _dead(c, d, provider, GrantState.NEEDS_REAUTH, since=now - WINDOW)
    for grant in marked:
        state = after(grant.state, GrantEvent.DOUBTED)
        assert state is not None  # noqa: S101 - the table of transitions says so
        grants.write(c, d, grant.id, now, state=state.value, state_since=now, doubted_at=now)
    keys = _keys(c, d, marked)
    for key in keys:
        gates.set_auth(c, d, key, "ok")
    alerts.withdraw(c, d, "needs_reauth", keys, now)
    return keys


def _decide(c: Connection, d: Dialect, provider: str, event: GrantEvent, *, believed: bool = True) -> list[Grant]:
    hold(c, d, provider)
    now = d.now(c)
    decided: list[Grant] = []
    for grant in _dead(c, d, provider, GrantState.SUSPECT):
        state = after(grant.state, event)
        assert state is not None  # noqa: S101 - as above
        doubted_at = None if believed else grant.doubted_at
        grants.write(
            c, d, grant.id, now, state=state.value, state_since=now, died_at=None, retry_at=None, doubted_at=doubted_at
        )
        decided.append(replace(grant, state=state, state_since=now, died_at=None))
    for key in _keys(c, d, decided):
        gates.set_auth(c, d, key, "ok" if event is GrantEvent.CLEARED else GrantState.NEEDS_REAUTH.value)
    gates.open_auth(c, d, provider, SUSPECT_AUTH)
    return decided


def _dead(c: Connection, d: Dialect, provider: str, state: GrantState, *, since: datetime | None = None) -> list[Grant]:
    """Grants that the fuse counts, in one state, locked."""
    recent = "" if since is None else " AND died_at > :died_since"
    return grants.lock_all(
        c, d, f"provider = :provider AND died_at IS NOT NULL AND state = :state{recent}",
        {"provider": provider, "state": state.value} | ({} if since is None else {"died_since": since}),
    )  # fmt: skip


def _keys(c: Connection, d: Dialect, rows: Sequence[Grant]) -> list[str]:
    """The accounts of some grants, in lock order."""
    return sorted({key for grant in rows for key in grants.keys_of(c, d, grant.id)})
