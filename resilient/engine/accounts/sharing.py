"""Accounts that share a grant: one is its owner, the others are its guests (``connections.add(grant_of=)``).

New credentials of the owner are for all, those of a guest for itself alone. Who is a guest is noted among the
details of its connection, which are sealed. Older code noted nothing: then nobody knows whose the grant is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from resilient.store.accounts import connections

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Connection

    from resilient.store.accounts.connections import Bound
    from resilient.store.db.dialect import Dialect

GUEST: Final = "resilient:guest"


def without_guest_note(details: Mapping[str, str]) -> dict[str, str]:
    """Details without the note that the account is a guest."""
    return {name: value for name, value in details.items() if name != GUEST}


def who_stays(c: Connection, d: Dialect, bound: Bound) -> list[str]:
    """The accounts that go on with the grant of one that gets new credentials; none: these are for all that use it.

    They are if all others share it as this one's (``grant_of=``), which older code did not note.
    """
    others = [one for one in connections.of_grant(c, d, bound.grant.id) if one.resource_key != bound.resource_key]
    is_its_own = GUEST not in bound.details and all(GUEST in one.details for one in others)
    return [] if is_its_own else [one.resource_key for one in others]


def owners(c: Connection, d: Dialect, bound: Bound) -> list[str]:
    """The accounts whose grant an account uses; all that use it, where nobody is known to be its owner."""
    every = connections.of_grant(c, d, bound.grant.id)
    return [one.resource_key for one in every if GUEST not in one.details] or [one.resource_key for one in every]
