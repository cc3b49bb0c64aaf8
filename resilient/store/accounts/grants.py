"""Grants: every statement that writes `resilient_grant`.

A refresh is three short transactions with the request between them, and none open meanwhile:

1. `begin` takes the lease (a higher ``fence``) and writes the mark ``sent_at``, or returns why not;
2. `renew_if_held` commits the new secrets if version and fence are still those of the beginning: nobody uses a
   token before that;
3. or `settle_if_held` writes what the failure means; if it is death, `fuse.die_if_held`.

A writer that was overtaken changes nothing. A lease is short, and kept up (`keep_up`) while its request is under way.
One that is over while the state is `refreshing` belongs to a process that died, or that could not reach the database.
The first to read it makes a last call: a live refresh has `LAST_CALL` seconds to commit, then the next takes over.
Meanwhile the accounts' jobs are parked (`park`): their resources rest, and go on as soon as the refresh has ended. Lock
order: the grant, then resource rows by key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from resilient.core.accounts.fuse import SHUT
from resilient.core.accounts.tokens import PROBED, REFRESHING, USABLE, GrantEvent, GrantState, after
from resilient.store.db.dialect import ID, TIME
from resilient.store.gates import controls as gates

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.store.db.dialect import Dialect

LAST_CALL: Final = 5.0  # seconds; see the top of this file
_COLUMNS: Final = (
    "id, provider, kind, flow, state, state_since, secrets, version, expires_at, refresh_at, fence, lease_until,"
    " sent_at, failures, retry_at, last_code, refreshed_at, died_at, created_at, worked_at, doubted_at,"
    " client_refused_at, refused_since, refusals, authorised_at"
)
_TIMES: Final = (
    "state_since", "expires_at", "refresh_at", "lease_until", "sent_at", "retry_at", "refreshed_at", "died_at",
    "created_at", "worked_at", "doubted_at", "client_refused_at", "refused_since", "authorised_at",
)  # fmt: skip
TYPES: Final[dict[str, Any]] = {
    name: TIME if name in _TIMES else ID if name == "id" else None for name in _COLUMNS.replace(" ", "").split(",")
}
_TYPED: Final = {name: type_ for name, type_ in TYPES.items() if type_ is not None}
_WELL: Final[dict[str, Any]] = {"doubted_at": None, "client_refused_at": None, "refused_since": None, "refusals": 0}


@dataclass(frozen=True, slots=True)
class Grant:
    """One row; its secrets as they are stored, out of its ``repr``."""

    id: UUID
    provider: str
    kind: str
    flow: str | None
    state: GrantState
    state_since: datetime
    secrets: str | None
    version: int
    expires_at: datetime | None
    refresh_at: datetime | None
    fence: int
    lease_until: datetime | None
    sent_at: datetime | None
    failures: int
    retry_at: datetime | None
    last_code: str | None
    refreshed_at: datetime | None
    died_at: datetime | None  # while the fuse counts it (`store/accounts/fuse.py`)
    created_at: datetime
    worked_at: datetime | None = None
    doubted_at: datetime | None = None
    client_refused_at: datetime | None = None
    refused_since: datetime | None = None
    refusals: int = 0
    authorised_at: datetime | None = None

    @property
    def has_worked(self) -> bool:
        """Whether the provider ever took these credentials."""
        return self.worked_at is not None or self.refreshed_at is not None

    def __repr__(self) -> str:
        return f"<Grant {self.id} of {self.provider}, {self.state}, version {self.version}>"


def new(id_: UUID, key: str, kind: str, now: datetime, *, flow: str | None = None) -> Grant:
    """A grant without any secrets yet, for the provider of a resource."""
    return Grant(
        id_, key.partition("/")[0], kind, flow, GrantState.ACTIVE, now, None, 1, None, None, 0, None, None, 0, None,
        None, None, None, now, authorised_at=now,
    )  # fmt: skip


def of_row(row: Any) -> Grant:
    """The `Grant` of a row that has `_COLUMNS`."""
    parts = list(row)
    parts[4] = GrantState(parts[4])
    return Grant(*parts)


def read(c: Connection, d: Dialect, id_: UUID) -> Grant | None:
    """One grant, without locking."""
    row = d.run(c, f"SELECT {_COLUMNS} FROM {{grant}} WHERE id = :id", {"id": d.id(id_)}, **_TYPED).first()
    return None if row is None else of_row(row)


def lock(c: Connection, d: Dialect, id_: UUID) -> Grant | None:
    """One grant, locked."""
    query = f"SELECT {_COLUMNS} FROM {{grant}} WHERE id = :id {{row_lock}}"
    row = d.run(c, query, {"id": d.id(id_)}, **_TYPED).first()
    return None if row is None else of_row(row)


def lock_all(c: Connection, d: Dialect, which: str, params: Mapping[str, Any]) -> list[Grant]:
    """The grants that a condition names, locked, in lock order."""
    query = f"SELECT {_COLUMNS} FROM {{grant}} WHERE {which} ORDER BY id {{row_lock}}"
    return [of_row(row) for row in d.run(c, query, params, **_TYPED)]


def keys_of(c: Connection, d: Dialect, id_: UUID) -> list[str]:
    """The resources that use a grant, in lock order."""
    rows = d.run(
        c,
        "SELECT resource_key FROM {connection} WHERE grant_id = :id ORDER BY resource_key",
        {"id": d.id(id_)},
    )
    return [row[0] for row in rows]


def insert_if_new(c: Connection, d: Dialect, grant: Grant, key_id: str | None) -> bool:
    """Insert a grant; False if there is one of that id."""
    values = {name: getattr(grant, name) for name in TYPES}
    values |= {"id": d.id(grant.id), "state": grant.state.value, "key_id": key_id, "now": d.now(c)}
    names = ", ".join(f":{name}" for name in TYPES)
    made = d.run(
        c,
        f"INSERT INTO {{grant}} ({_COLUMNS}, key_id, updated_at) VALUES ({names}, :key_id, :now)"
        " ON CONFLICT (id) DO NOTHING RETURNING 1",
        values,
    ).first()
    return made is not None


# -- refreshing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lease:
    """The result of `begin`: the row as it is now, and whether this caller has the lease and may send.

    ``shut``: the provider's gate forbids it.
    """

    grant: Grant
    may_send: bool
    now: datetime
    shut: bool = False


def begin(
    c: Connection, d: Dialect, id_: UUID, version: int, lease: float, *, refused: bool, probe: bool = False
) -> Lease | None:
    """Take the lease of a grant that still has this version, and write the mark; None if there is no such grant.

    ``refused``: the provider no longer takes that version's token, so it counts as expired from now on, whoever
    refreshes it. ``probe``: to find out whether the provider is well again, so neither its gate nor a doubt about
    this grant forbids it.
    """
    grant = lock(c, d, id_)
    if grant is None:
        return None
    now = d.now(c)
    if grant.version != version or grant.state not in (PROBED if probe else USABLE):
        return Lease(grant, may_send=False, now=now)
    if refused and (grant.expires_at is None or grant.expires_at > now):
        grant = replace(grant, expires_at=now, refresh_at=now)
        write(c, d, id_, now, expires_at=now, refresh_at=now)
    is_leased = grant.lease_until is not None and grant.lease_until > now
    waits = grant.retry_at is not None and grant.retry_at > now
    if is_leased or (waits and not probe):
        return Lease(grant, may_send=False, now=now)
    if not probe and gates.auth_of(c, d, grant.provider) in SHUT:
        return Lease(grant, may_send=False, now=now, shut=True)
    if grant.state is GrantState.REFRESHING:  # its process died, or cannot reach us: the answer may have been lost
        state, until = _next(grant.state, GrantEvent.LOST), now + timedelta(seconds=LAST_CALL)
        write(c, d, id_, now, state=state.value, state_since=now, lease_until=until)
        return Lease(replace(grant, state=state, state_since=now, lease_until=until), may_send=False, now=now)
    until = now + timedelta(seconds=lease)
    grant = replace(
        grant,
        state=_next(grant.state, GrantEvent.BEGUN),
        fence=grant.fence + 1,
        lease_until=until,
        sent_at=now,
    )
    write(
        c, d, id_, now,
        state=grant.state.value, state_since=now, fence=grant.fence, lease_until=until, sent_at=now,
    )  # fmt: skip
    return Lease(grant, may_send=True, now=now)


@dataclass(frozen=True, slots=True)
class NewSecrets:
    """Secrets that a refresh or a person brought, encrypted."""

    secrets: str | None
    key_id: str | None
    expires_at: datetime | None
    refresh_at: datetime | None


def keep_up(c: Connection, d: Dialect, before: Grant, lease: float) -> bool:
    """Prolong the lease of a refresh; False if it is lost. ``before``: the row as the refresh began."""
    until = d.now(c) + timedelta(seconds=lease)
    done = d.run(
        c,
        "UPDATE {grant} SET lease_until = :until WHERE id = :id AND fence = :fence AND state = 'refreshing'",
        {"id": d.id(before.id), "fence": before.fence, "until": until},
    )
    return bool(done.rowcount)


def park(c: Connection, d: Dialect, id_: UUID) -> datetime | None:
    """Let the accounts of a grant rest while it cannot be refreshed; returns until when, None if it can be now."""
    grant = lock(c, d, id_)
    if grant is None or grant.state not in USABLE:
        return None
    now = d.now(c)
    until = max((at for at in (grant.lease_until, grant.retry_at) if at is not None and at > now), default=None)
    for key in keys_of(c, d, id_) if until is not None else ():
        gates.cool_down(c, d, key, until, REFRESHING, 0.0, exact=True)
    return until


def renew_if_held(c: Connection, d: Dialect, before: Grant, fresh: NewSecrets | Callable[[Grant], NewSecrets]) -> bool:
    """Commit the outcome of a refresh, unless another writer was faster; its resources' gates open.

    ``fresh``: new secrets, or what makes them of the row as it is now.
    """
    grant = lock(c, d, before.id)
    if grant is None or (grant.version, grant.fence) != (before.version, before.fence):
        return False
    state = after(grant.state, GrantEvent.RENEWED)
    if state is None:
        return False
    now, fresh = d.now(c), fresh(grant) if callable(fresh) else fresh
    write(
        c, d, before.id, now,
        state=state.value, state_since=now, secrets=fresh.secrets, key_id=fresh.key_id, version=grant.version + 1,
        expires_at=fresh.expires_at, refresh_at=fresh.refresh_at, lease_until=None, sent_at=None, failures=0,
        retry_at=None, last_code=None, refreshed_at=now, died_at=None, worked_at=now, **_WELL,
    )  # fmt: skip
    gate(c, d, before.id, "ok")
    return True


def note_worked(c: Connection, d: Dialect, id_: UUID, version: int) -> None:
    """Note that the provider accepted these credentials; not if the row is locked, so that nothing waits for it."""
    d.run(
        c,
        "UPDATE {grant} SET worked_at = :now, doubted_at = NULL WHERE id ="
        " (SELECT id FROM {grant} WHERE id = :id AND version = :version {skip_locked})",
        {"id": d.id(id_), "version": version, "now": d.now(c)},
    )


def settle_if_held(
    c: Connection,
    d: Dialect,
    before: Grant,
    event: GrantEvent,
    code: str | None,
    retry_at: datetime | None,
    *,
    unexplained: bool = False,
    client: bool = False,
) -> Grant | None:
    """Write what a failed refresh means, unless another writer was faster; returns the row as it is then.

    One whose death is in doubt stays so. ``unexplained``: refused for a reason no provider declares; ``client``: the
    reason seems to be the application.
    """
    grant = lock(c, d, before.id)
    if grant is None or (grant.version, grant.fence) != (before.version, before.fence):
        return grant
    if grant.state is not GrantState.REFRESHING:  # it was settled before, and the answer to that was lost
        return grant
    state = after(grant.state, event if grant.died_at is None else GrantEvent.DOUBTED)
    if state is None:
        return grant
    now = d.now(c)
    sent_at = grant.sent_at if event is GrantEvent.LOST else None
    if unexplained:
        refusals, since = grant.refusals + 1, grant.refused_since or now
        write(c, d, before.id, now, refusals=refusals, refused_since=since)
    if client:
        write(c, d, before.id, now, client_refused_at=now)
    write(
        c, d, before.id, now,
        state=state.value, state_since=now if state is not grant.state else grant.state_since, lease_until=None,
        sent_at=sent_at, failures=grant.failures + 1, retry_at=retry_at, last_code=code,
    )  # fmt: skip
    _unpark(c, d, before.id)
    return replace(grant, state=state, failures=grant.failures + 1, retry_at=retry_at, last_code=code)


def let_go(c: Connection, d: Dialect, before: Grant) -> None:
    """Give the lease back, because nothing was sent."""
    grant = lock(c, d, before.id)
    if grant is not None and grant.fence == before.fence and grant.state is GrantState.REFRESHING:
        state = _next(grant.state, GrantEvent.REFUSED if grant.died_at is None else GrantEvent.DOUBTED)
        write(c, d, before.id, d.now(c), state=state.value, lease_until=None, sent_at=None)
        _unpark(c, d, before.id)


# -- by people -----------------------------------------------------------------------------------------------


def authorise(c: Connection, d: Dialect, id_: UUID, fresh: NewSecrets, *, kind: str, flow: str | None) -> bool:
    """Write new credentials: a refresh under way is overtaken, the accounts go on. False without such a grant."""
    grant = lock(c, d, id_)
    if grant is None:
        return False
    now = d.now(c)
    state = _next(grant.state, GrantEvent.AUTHORISED)
    write(
        c, d, id_, now,
        state=state.value, state_since=now, secrets=fresh.secrets, key_id=fresh.key_id, version=grant.version + 1,
        expires_at=fresh.expires_at, refresh_at=fresh.refresh_at, fence=grant.fence + 1, lease_until=None,
        sent_at=None, failures=0, retry_at=None, last_code=None, died_at=None, kind=kind, flow=flow,
        refreshed_at=None, worked_at=None, authorised_at=now, **_WELL,
    )  # fmt: skip
    gate(c, d, id_, "ok")
    return True


def give_up(c: Connection, d: Dialect, id_: UUID) -> Grant | None:
    """Forget a grant's secrets and shut its accounts' gates.

    Returns the row as it was before; None if it had been given up.
    """
    grant = lock(c, d, id_)
    state = None if grant is None else after(grant.state, GrantEvent.GIVEN_UP)
    if grant is None or state is None:
        return None
    now = d.now(c)
    write(
        c, d, id_, now,
        state=state.value, state_since=now, secrets=None, version=grant.version + 1, fence=grant.fence + 1,
        lease_until=None, sent_at=None, retry_at=None, died_at=None,
    )  # fmt: skip
    gate(c, d, id_, state.value)
    return grant


def delete(c: Connection, d: Dialect, id_: UUID) -> None:
    """Delete a grant that no resource uses, with its secrets."""
    d.run(c, "DELETE FROM {grant} WHERE id = :id", {"id": d.id(id_)})


def delete_if_unused(c: Connection, d: Dialect, id_: UUID) -> None:
    """Delete a grant that no resource uses any more; the caller has locked it, so that no resource comes to use it."""
    if not keys_of(c, d, id_):
        delete(c, d, id_)


# -- keys ----------------------------------------------------------------------------------------------------


def lock_next(c: Connection, d: Dialect, after: UUID | None, limit: int, *, waits: bool) -> Sequence[Grant]:
    """Lock the next grants by id; ``waits``: also wait for those that are locked."""
    lock_ = "{row_lock}" if waits else "{skip_locked}"
    query = (
        f"SELECT {_COLUMNS} FROM {{grant}}"
        + (" WHERE id > :after_id" if after else "")
        + f" ORDER BY id LIMIT :limit {lock_}"
    )
    params = {"limit": limit} | ({"after_id": d.id(after)} if after else {})
    return [of_row(row) for row in d.run(c, query, params, **_TYPED)]


def reseal(c: Connection, d: Dialect, id_: UUID, secrets: str, key_id: str) -> None:
    """Write the same secrets under another key; the caller has locked the row."""
    write(c, d, id_, d.now(c), secrets=secrets, key_id=key_id)


# -- inside --------------------------------------------------------------------------------------------------


def _next(state: GrantState, event: GrantEvent) -> GrantState:
    state_after = after(state, event)
    assert state_after is not None, f"{event} in {state}"  # noqa: S101 - callers looked before
    return state_after


def gate(c: Connection, d: Dialect, id_: UUID, auth: str) -> None:
    """Write the gate of a grant's accounts: whether they may go on, or must wait."""
    for key in keys_of(c, d, id_):
        gates.set_auth(c, d, key, auth)
    _unpark(c, d, id_)


def _unpark(c: Connection, d: Dialect, id_: UUID) -> None:
    for key in keys_of(c, d, id_):
        gates.warm_up_from(c, d, key, REFRESHING)


def write(c: Connection, d: Dialect, id_: UUID, now: datetime, **values: Any) -> None:
    """Set some columns; the caller has locked the row."""
    sets = ", ".join(f"{name} = :{name}" for name in values)
    d.run(
        c,
        f"UPDATE {{grant}} SET {sets}, updated_at = :now WHERE id = :id",
        {**values, "id": d.id(id_), "now": now},
    )
