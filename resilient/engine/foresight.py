"""What an enqueue will come to, where the app can see it already: said once in the log, nothing is refused.

- A resource key whose first part is almost the name of a provider (``hubspott/a1``): its requests have no address.
- A kind that is not among the app's handlers: it waits until a worker that has it runs. An app that lists no handlers
  is one that only enqueues, and says nothing; ``kinds=`` lists those that other programs run.

A warning and no refusal, because both may be meant: a resource may have any name, and another program's workers other
handlers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from resilient.core.phrases import nearest
from resilient.engine.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from resilient.engine.enqueue import Ordered
    from resilient.engine.handler import Handler, Kind

log = logging.getLogger("resilient.app")
MOST: Final = 1_000  # names that are remembered: where each account is a name of its own, the rest is not looked at


class Foresight:
    """Looks at the jobs of one app before they are written."""

    def __init__(
        self, handlers: Mapping[str, Handler[Any, Any]], declared: Mapping[str, Kind[Any]], providers: Collection[str]
    ) -> None:
        """``handlers`` are what its workers run, ``declared`` those and its ``kinds=``."""
        self._runs = any(not isinstance(one, Relay) for one in handlers.values())
        self._declared, self._providers = declared, providers
        self._kinds, self._names = set(declared), set(providers)

    def look(self, ordered: Iterable[Ordered]) -> None:
        """Warn of what was not warned of before."""
        for one in ordered:
            row = one.row
            if row.kind not in self._kinds:
                self._kind(row.kind)
            name = row.resource_key.partition("/")[0]
            if name not in self._names:
                self._name(name, row.resource_key)

    def _kind(self, kind: str) -> None:
        if len(self._kinds) < MOST:
            self._kinds.add(kind)
            if self._runs:
                log.warning(
                    "%r is not among the handlers of this app: its jobs wait until a worker that has it runs. List it"
                    " in Resilient(handlers=[...]), or in kinds=[...] if another program's workers run it",
                    kind,
                )

    def _name(self, name: str, key: str) -> None:
        if len(self._names) < MOST:
            self._names.add(name)
            if hint := nearest(name, self._providers):
                log.warning(
                    "resource key %r: this app has no provider %r, so requests of its jobs have no address%s",
                    key,
                    name,
                    hint,
                )
