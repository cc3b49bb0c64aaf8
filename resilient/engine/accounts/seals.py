"""Seals: a row of `resilient_connection` is used only as this program wrote it.

The secrets of a grant are encrypted for its row; which account uses that grant, and the details that fill the addresses
its token is sent to, stand in another row. Somebody who can write the database, but lacks the keys, could give one
customer's grant to another account, or have a token sent to a host of their choice. So key, grant and details are
signed by the key ring.

Such a person could also empty the column of the seal. So the encrypted secrets have a note (`SEALED`) that a seal is
required; older code keeps that note. Grants that older code wrote lack it: their connections are used without a seal
until they are connected again, or until `resilient secrets rotate` seals them as they are then. An old copy of such
secrets opens as long as their key is in the ring: a new key, and the removal of the old one, end that.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import BadPayload, SecretsUnreadable
from resilient.core.base.loggers import logger
from resilient.core.base.phrases import counted
from resilient.core.jobs.records import START
from resilient.engine.ground import sealing
from resilient.store.accounts import connections, grants, secrets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection

    from resilient.core.accounts.tokens import Credentials
    from resilient.engine.accounts.access import Accounts
    from resilient.engine.ground.sessions import Transactions
    from resilient.store.accounts.connections import Bound
    from resilient.store.accounts.secrets import KeyRing
    from resilient.store.db.dialect import Dialect


log = logger("connections")
SEALED: Final = "resilient:sealed"  # among a grant's encrypted values; no placeholder has such a name
_PURPOSE: Final = "resilient_connection"


def with_note(credentials: Credentials) -> Credentials:
    """The credentials with the note that connections to them are sealed."""
    return replace(credentials, values={**credentials.values, SEALED: "1"})


def has_note(credentials: Credentials) -> bool:
    """Whether connections to these credentials must be sealed."""
    return SEALED in credentials.values


def seal(ring: KeyRing, key: str, grant_id: UUID, details: Mapping[str, str]) -> str | None:
    """The seal of a connection; None without any key."""
    return ring.mark(_PURPOSE, _content(key, grant_id, details)) if ring else None


def fits(ring: KeyRing, bound: Bound) -> bool:
    """Whether the row is as it was sealed."""
    content = _content(bound.resource_key, bound.grant.id, bound.details)
    return bound.seal is not None and ring.is_mark(bound.seal, _PURPOSE, content)


def require(ring: KeyRing, bound: Bound, credentials: Credentials) -> None:
    """Raise `SecretsUnreadable` for a connection whose row something else has changed."""
    if not ring or not _needs_seal(bound, is_required=has_note(credentials)) or fits(ring, bound):
        return
    raise SecretsUnreadable(
        f"the connection of {bound.resource_key} does not fit its seal: its grant or its details were changed in the"
        " database by something else than this program, or the key that sealed it is not among those given (then add"
        f" it); nothing is sent. If it was changed: connect it again, `resilient connect {bound.resource_key}`"
    )


def seal_all(c: Connection, d: Dialect, ring: KeyRing, grant_id: UUID, *, was_required: bool) -> list[str]:
    """Sign the connections of a grant with the first key, as they are; returns the keys of those that were refused.

    ``was_required``: they had to be sealed before, so one whose seal does not fit is refused and stays as it is. The
    caller has locked the grant.
    """
    refused = []
    for bound in connections.of_grant(c, d, grant_id):
        if _needs_seal(bound, is_required=was_required) and not fits(ring, bound):
            refused.append(bound.resource_key)
        elif not fits(ring, bound) or not ring.is_current(bound.seal or ""):
            new_seal = seal(ring, bound.resource_key, grant_id, bound.details)
            connections.set_seal(c, d, bound.resource_key, new_seal)
    return refused


def _needs_seal(bound: Bound, *, is_required: bool) -> bool:
    """Whether a connection is refused without its seal.

    Secrets in the app's own table (`CredentialStore`) are read by the account's key: there only details need a seal.
    """
    return bool(bound.details) if bound.grant.secrets is None else is_required


def _content(key: str, grant_id: UUID, details: Mapping[str, str]) -> str:
    return json.dumps([key, grant_id.hex, sorted(details.items())], ensure_ascii=True)


# -- keys that change -------------------------------------------------------------------------------------------------
#
# Grants and connections under a new key, while everything runs: a few in each transaction.

_BATCH: Final = 200  # grants in one transaction


async def reseal_grants(db: Transactions, accounts: Accounts) -> int:
    """Encrypt all credentials with the first key, and seal all connections; returns how many grants were changed."""
    done, refused, unreadable = 0, set[str](), set[object]()
    for waits in (False, True):  # grants under refresh at this moment come last
        step = _Step()
        while not step.is_over:
            step = await db.write(None, _reseal_batch, accounts, step.last, waits=waits)
            done += step.changed
            refused.update(step.refused)
            unreadable.update(step.unreadable)
    if unreadable:
        log.warning("no key given here opens %s: they stay as they are", counted(len(unreadable), "grant"))
    for key in sorted(refused):
        log.warning("the connection of %s does not fit its seal, and is refused: connect it again", key)
    return done


@dataclass(frozen=True, slots=True)
class _Step:
    """What one transaction did: its last grant, its changes, what it left as it was.

    ``refused``: connections that do not fit their seals; ``unreadable``: grants that no key opens.
    """

    last: UUID | None = None
    changed: int = 0
    refused: tuple[str, ...] = ()
    unreadable: tuple[UUID, ...] = ()
    is_over: bool = False


def _reseal_batch(c: Connection, d: Dialect, accounts: Accounts, after: UUID | None, *, waits: bool) -> _Step:
    batch, changed = grants.lock_next(c, d, after, _BATCH, waits=waits), 0
    refused, unreadable = list[str](), []
    for grant in batch:
        try:
            credentials = accounts.decrypt(grant)
        except SecretsUnreadable:
            if not accounts.ring:
                raise
            unreadable.append(grant.id)
            continue
        if accounts.ring:
            refused += seal_all(c, d, accounts.ring, grant.id, was_required=has_note(credentials))
        if grant.secrets is None or (
            secrets.key_id_of(grant.secrets) == accounts.ring.current and has_note(credentials)
        ):
            continue
        new = accounts.encrypt(grant.id, with_note(credentials))
        grants.reseal(c, d, grant.id, new.secrets or "", new.key_id or "")
        changed += 1
    return _Step(batch[-1].id if batch else after, changed, tuple(refused), tuple(unreadable), is_over=not batch)


# -- payloads ---------------------------------------------------------------------------------------------------------
#
# Sealed payloads under a new key, while everything runs: jobs of every state, what they are to be when they run once
# more, and the undos of workflows (`secrets.ROTATED`).
#
# The templates of schedules are not walked over: workers write them with their own first key when they start.

_WALKS: Final = 3  # over everything, as long as rows change under it


async def reseal_payloads(db: Transactions, ring: KeyRing) -> int:
    """Seal every payload with the first key; returns how many were changed. The log says what is left under others."""
    if not ring:
        return 0
    done = 0
    for _ in range(_WALKS):
        tally = await _walk(db, ring)
        done += tally.done
        if not tally.changed_rows:
            break
    unreadable, changed_rows = tally.unreadable, tally.changed_rows
    if unreadable:
        keys = ", ".join(f"{number} under {key_id}" for key_id, number in sorted(unreadable.items()))
        log.warning(
            "%s no key given here opens, and stay so (%s): give this command the missing key, or cancel their jobs",
            counted(unreadable.total(), "sealed payload"), keys,
        )  # fmt: skip
    if changed_rows:
        log.warning("%s changed meanwhile: rotate again", counted(changed_rows, "sealed payload"))
    if old := await db.read(None, secrets.schedules_under_other_keys, ring.current):
        log.warning(
            "the payload of %s is under another key until a worker that declares it starts with this one in front: %s",
            counted(len(old), "schedule"), ", ".join(old),
        )  # fmt: skip
    return done


@dataclass(slots=True)
class _Tally:
    """What one walk did: changes, rows that something else changed meanwhile, and what no key opens, by key."""

    done: int = 0
    changed_rows: int = 0
    unreadable: Counter[str] = field(default_factory=Counter)


async def _walk(db: Transactions, ring: KeyRing) -> _Tally:
    tally, job, step = _Tally(), None, None
    while True:
        rows, job = await db.read(None, secrets.sealed_under_other_keys, ring.current, job)
        await _reseal_each(db, ring, rows, tally)
        if job is None:
            break
    while True:
        rows, step = await db.read(None, secrets.undos_under_other_keys, ring.current, step)
        await _reseal_each(db, ring, rows, tally)
        if step is None:
            return tally


async def _reseal_each(db: Transactions, ring: KeyRing, rows: Sequence[secrets.SealedRow], tally: _Tally) -> None:
    for row in rows:
        text = _sealed(row)
        if not text.startswith(START):  # a tag of a job that has these words
            continue
        changed = await db.write(None, reseal_payload, ring, row)
        tally.done, tally.changed_rows = tally.done + (changed is True), tally.changed_rows + (changed is False)
        if changed is None:
            tally.unreadable[secrets.key_id_of(text.removeprefix(START).lstrip(': "'))] += 1


def reseal_payload(c: Connection, d: Dialect, ring: KeyRing, row: secrets.SealedRow) -> bool | None:
    """One payload under the first key; False if it has changed meanwhile, None if no key opens it."""
    try:
        text = sealing.reseal(ring, row.kind, _sealed(row))
    except BadPayload:
        return None
    if row.column == "wish":
        text = json.dumps({**json.loads(row.text), "payload": text})
    return secrets.write_sealed(c, d, row, text)


def _sealed(row: secrets.SealedRow) -> str:
    """The payload itself, as JSON text: what a job is to be when it runs once more holds it among the rest."""
    return str(json.loads(row.text)["payload"]) if row.column == "wish" else row.text
