"""Deaths of grants, and the fuse that holds them back when there are too many (`core.fuse`).

Deaths of one provider's grants are counted under one lock (`hold`), so that of many at the same moment each sees those
before it. Lock order: that lock, grants by id, their accounts by key, the provider.

Whoever must hear that an account needs a person does so in the same transaction (`Voice`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from resilient.core import fuse
from resilient.core.client_refusal import LATELY
from resilient.core.fuse import APP_REFUSED, SUSPECT_AUTH, WINDOW
from resilient.core.tokens import USABLE, GrantEvent, GrantState, after
from resilient.store import alerts, gates, grants, schedules
from resilient.store.dialect import ID, TIME

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.dialect import Dialect
    from resilient.store.grants import Grant

_WELL: Final = ", ".join(f"'{state.value}'" for state in sorted(USABLE))
_ALL: Final = 1_000_000_000


class Voice(Protocol):
    """Who tells people, in the transaction of what there is to tell."""

    def tell(self, c: Connection, d: Dialect, dead: Sequence[Grant]) -> None:
        """The accounts of these grants need a person."""

    def hush(self, c: Connection, d: Dialect, provider: str) -> None:
        """What nobody has heard yet of this provider's deaths is not to be told."""


@dataclass(frozen=True, slots=True)
class Death:
    """What became of it. ``grant``: the row as it is then; ``died``, ``blown`` (the fuse): by this call."""

    grant: Grant | None
    died: bool = False
    blown: bool = False


def hold(c: Connection, d: Dialect, provider: str) -> None:
    """Be the only one who judges this provider's grants, until the transaction ends."""
    schedules.hold(c, d, chore(provider))


def chore(provider: str) -> str:
    """The name of the chore that probes a provider's credentials."""
    return f"engine:credentials:{provider}"


def die_if_held(c: Connection, d: Dialect, held: Grant, code: str | None, voice: Voice) -> Death:
    """A refresh found its grant dead; unless somebody was faster."""
    hold(c, d, held.provider)
    grant = grants.lock(c, d, held.id)
    if grant is None or (grant.version, grant.fence) != (held.version, held.fence):
        return Death(grant)
    return _die(c, d, grant, code, voice)


def die_if_version(c: Connection, d: Dialect, known: Grant, code: str | None, voice: Voice) -> Death:
    """The provider refuses credentials that nobody can renew, or fresh ones."""
    hold(c, d, known.provider)
    grant = grants.lock(c, d, known.id)
    if grant is None or grant.version != known.version or grant.state is GrantState.REFRESHING:
        return Death(grant)
    return _die(c, d, grant, code, voice)


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
    """Whether some suspect can be refreshed, to find out whether it lives."""
    found = d.run(
        c,
        "SELECT 1 FROM {grant} WHERE provider = :provider AND died_at IS NOT NULL AND state = 'suspect'"
        " AND kind = 'oauth2' LIMIT 1",
        {"provider": provider},
    )
    return found.first() is not None


def well(c: Connection, d: Dialect, provider: str) -> list[UUID]:
    """A few grants that nobody doubts and that may be refreshed: those that worked last, for they are likely alive."""
    rows = d.run(
        c,
        f"SELECT id FROM {{grant}} WHERE provider = :provider AND state IN ({_WELL}) AND died_at IS NULL"
        " AND kind = 'oauth2' ORDER BY coalesce(worked_at, refreshed_at) DESC NULLS LAST, id LIMIT 5",
        {"provider": provider},
        id=ID,
    )
    return list(rows.scalars())


def client_taken(c: Connection, d: Dialect, provider: str) -> None:
    """The provider took our client: whoever waited because it did not goes on."""
    if gates.auth_of(c, d, provider) == APP_REFUSED:
        gates.set_auth(c, d, provider, "ok")


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known about the application at its provider, beside one grant that was refused.

    ``credible``: that grant has worked, or none ever has; ``others``: credible ones that were refused since the
    application was last taken; ``lately``: it was taken a moment ago; ``witnesses``: well ones that could be asked.
    """

    credible: bool
    others: int
    lately: bool
    witnesses: Sequence[UUID]


def standing(c: Connection, d: Dialect, grant: Grant) -> Standing:
    """What speaks for and against the application; see `core.client_refusal`."""
    now, params = d.now(c), {"provider": grant.provider, "grant_id": d.id(grant.id)}
    others = "FROM {grant} WHERE provider = :provider AND id <> :grant_id"
    worked = "(worked_at IS NOT NULL OR refreshed_at IS NOT NULL)"
    taken = d.run(
        c, f"SELECT max(refreshed_at) AS refreshed, max(died_at) AS died {others}", params, refreshed=TIME, died=TIME
    ).one()
    last = max((at for at in taken if at is not None), default=None)
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
    lately = last is not None and now - last < LATELY
    return Standing(grant.has_worked or alone, int(refused), lately, list(rows.scalars()))


def release(c: Connection, d: Dialect, provider: str, *, believed: bool = True) -> list[Grant]:
    """The provider erred: its suspects are as good as before, its gate opens. Returns them.

    Unless they are ``believed``, who is refused once more before they worked again dies without a doubt.
    """
    return _decide(c, d, provider, GrantEvent.CLEARED, believed=believed)


def confirm(c: Connection, d: Dialect, provider: str, voice: Voice) -> list[Grant]:
    """They are dead: their accounts wait for people, who are told, and the provider's gate opens. Returns them."""
    dead = _decide(c, d, provider, GrantEvent.DIED)
    voice.tell(c, d, dead)
    return dead


# -- inside --------------------------------------------------------------------------------------------------


def _die(c: Connection, d: Dialect, grant: Grant, code: str | None, voice: Voice) -> Death:
    now = d.now(c)
    shut = gates.auth_of(c, d, grant.provider) == SUSPECT_AUTH
    counts = grant.has_worked and (grant.doubted_at is None or grant.died_at is not None)  # a probe changes nothing
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
        voice.tell(c, d, [grant])
    elif not shut:
        voice.hush(c, d, grant.provider)
        _hold_back(c, d, grant.provider, now)
        gates.set_auth(c, d, grant.provider, SUSPECT_AUTH)
    return Death(grant, died=True, blown=doubted and not shut)


def _blows(c: Connection, d: Dialect, grant: Grant, now: datetime) -> bool:
    """Whether this death is one too many; most of the time that costs one look into a small index."""
    dead = 1 + _count(c, d, "died_at > :died_since AND id <> :grant_id", _ALL, grant, died_since=now - WINDOW)
    if not fuse.blows(dead, 0):
        return False
    return fuse.blows(dead, _count(c, d, f"state IN ({_WELL}) AND id <> :grant_id", fuse.enough(dead), grant))


def _count(c: Connection, d: Dialect, which: str, most: int, grant: Grant, **params: datetime) -> int:
    found = d.run(
        c,
        f"SELECT count(*) FROM (SELECT 1 FROM {{grant}} WHERE provider = :provider AND {which} LIMIT :most) AS found",
        {"provider": grant.provider, "grant_id": d.id(grant.id), "most": most, **params},
    ).scalar_one()
    return int(found)


def _hold_back(c: Connection, d: Dialect, provider: str, now: datetime) -> None:
    """Take back the marks of those that died just before; those who were not told yet are not."""
    marked = _dead(c, d, provider, GrantState.NEEDS_REAUTH, since=now - WINDOW)
    for grant in marked:
        state = after(grant.state, GrantEvent.DOUBTED)
        assert state is not None  # noqa: S101 - the table of transitions says so
        grants.write(c, d, grant.id, now, state=state.value, state_since=now, doubted_at=now)
    keys = _keys(c, d, marked)
    for key in keys:
        gates.set_auth(c, d, key, "ok")
    alerts.withdraw(c, d, "needs_reauth", keys, now)


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
    if gates.auth_of(c, d, provider) == SUSPECT_AUTH:
        gates.set_auth(c, d, provider, "ok")
    return decided


def _dead(c: Connection, d: Dialect, provider: str, state: GrantState, *, since: datetime | None = None) -> list[Grant]:
    """Grants that the fuse counts, in one state, locked."""
    recent = "" if since is None else " AND died_at > :died_since"
    return grants.lock_all(
        c, d, f"provider = :provider AND died_at IS NOT NULL AND state = :state{recent}",
        {"provider": provider, "state": state.value} | ({} if since is None else {"died_since": since}),
    )  # fmt: skip


def _keys(c: Connection, d: Dialect, found: Sequence[Grant]) -> list[str]:
    """The accounts of some grants, in lock order."""
    return sorted({key for grant in found for key in grants.keys_of(c, d, grant.id)})
