"""Chores of a database's housekeeping: one that fails keeps no other from being done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.core.base.errors import DatabaseUnreachable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    Chore = Callable[[], Awaitable[Any]]


async def do_all(chores: Iterable[Chore]) -> None:
    """Do each, in this order; raise the first error at the end. A database that is away ends it at once."""
    errors: list[Exception] = []
    for chore in chores:
        try:
            await chore()
        except DatabaseUnreachable:
            raise
        except Exception as error:  # noqa: BLE001 - the first is raised below
            errors.append(error)
    if errors:
        for later in errors[1:]:
            errors[0].add_note(f"and then {type(later).__name__}: {later}")
        raise errors[0]
