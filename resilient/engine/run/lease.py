"""Whether an execution still has its job, asked before what no fence can undo: a handler, a request, an event.

A process that was frozen, or cut off from its database, does not know that its leases are over: what it begins then has
been begun by another one. So each execution knows until when its lease lasts (`Execution.held_until`), counted from
before the statement that took or renewed it, and beyond that asks (`require_lease`).
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from resilient.core.base.errors import ResourceStopped
from resilient.engine.run.execution import InEngine, patiently
from resilient.store.db import trouble
from resilient.store.jobs import leases

if TYPE_CHECKING:
    from resilient.engine.run.execution import Execution

MOST_RENEWALS: Final = 3  # in a row, by one that is over as soon as it is taken


async def require_lease(execution: Execution) -> None:
    """Renew its lease if that may be over. Raises `LostLease`, or `ResourceStopped` while nobody can tell."""
    execution.require_running()
    run, lease = execution.context.ground.database.transaction, timedelta(seconds=execution.lease)
    keep = partial(run, leases.keep_if_held, execution.id, execution.fence, lease)
    for _ in range(MOST_RENEWALS):  # it may stand still in between, too
        if not execution.is_unsure:
            return
        began = leases.clock()
        try:
            with InEngine(execution):
                execution.require_held(await patiently(execution, keep))
        except Exception as error:
            if trouble.is_of_database(error):
                raise ResourceStopped(execution.resource_key, "database") from error
            raise
        execution.hold(began)
        execution.require_running()
