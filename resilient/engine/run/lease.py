"""The check that an execution still has its job before what no fence can undo: a handler, a request, an event.

A process that was frozen, or cut off from its database, does not know that its leases have run out. Another worker may
have its jobs, and it would do their work a second time. So each execution knows how long its lease lasts at least
(`Execution.held_until`, counted from before the statement that took or renewed the lease). After that time
`require_lease` renews the lease first.
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

MOST_RENEWALS: Final = 3  # in a row, of a lease that has run out again before anything began


async def require_lease(execution: Execution) -> None:
    """Renew the lease if it may have run out.

    Raises `LostLease` if another worker has the job, and `ResourceStopped` while the database cannot say who has it.
    """
    execution.require_running()
    run, lease = execution.context.ground.database.transaction, timedelta(seconds=execution.lease)
    keep = partial(run, leases.keep_if_held, execution.id, execution.fence, lease)
    for _ in range(MOST_RENEWALS):  # the process may be frozen between two of these lines, too
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
