"""`app.resources`: what is stopped and why; stop it, let it go, limit it. `app.sync.resources`: synchronous.

A method that changes takes a key, which need not have been used yet, or a pattern (``github/*``), which means
the existing resources that match it, with ``gate`` only those it stops. Each resource is changed in a
transaction of its own (with ``session=`` all in the caller's, deepest first, as everybody locks them).
Whatever opens a gate releases the turns that wait for it; the load comes back step by step.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core import resource_key
from resilient.core.changed import Changed
from resilient.core.errors import InvalidInput, NaiveDatetime
from resilient.core.limit import Limit
from resilient.core.policy import BreakerPolicy
from resilient.core.why import Why, why_resource
from resilient.engine.sessions import CallersSession, Face, Transactions, blocking
from resilient.store import gates, resource_queries, resources, situation
from resilient.store.edits import UNSET, Unset

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.policy import Policies
    from resilient.core.records import ResourceInfo, StoppedGroup
    from resilient.engine.app import Resilient
    from resilient.store.dialect import Dialect
    from resilient.store.resource_queries import Gate

Aspect = Literal["limits", "concurrency", "breaker"]
ASPECTS: Final = ("limits", "concurrency", "breaker")


class Resources:
    """Resources of one app. Raises `BadResourceKey` for what is no key or pattern."""

    def __init__(self, app: Resilient, *, here: bool = False) -> None:
        self._app, self._db = app, Transactions(app, here=here)

    @property
    def sync(self) -> SyncResources:
        """The same for synchronous programs."""
        return SyncResources(Resources(self._app, here=True))

    # -- looking ---------------------------------------------------------------------------------------------

    async def get(self, key: str, *, session: CallersSession = None) -> ResourceInfo:
        """One resource; one that was never used stops nothing."""
        return await self._db.read(session, resource_queries.get, resource_key.check(key))

    async def list(
        self,
        pattern: str | None = None,
        *,
        gate: Gate | Literal["any"] | None = None,
        limit: int = 100,
        after: str | None = None,
        session: CallersSession = None,
    ) -> builtins.list[ResourceInfo]:
        """A page of the resources in use, by key.

        With ``gate`` those it stops. The next one is ``after`` the last.
        """
        if pattern is not None:
            resource_key.check_pattern(pattern)
        return await self._db.read(session, resource_queries.page, pattern=pattern, gate=gate, limit=limit, after=after)

    async def summary(self, *, session: CallersSession = None) -> builtins.list[StoppedGroup]:
        """What is stopped, grouped by provider, gate and code: the answer at three in the morning."""
        return await self._db.read(session, resource_queries.summary)

    async def why(self, key: str, *, session: CallersSession = None) -> Why:
        """Why the jobs of a resource are not running, and when they will."""
        return await self._db.read(session, _why, self._app.policies, resource_key.check(key))

    # -- changing --------------------------------------------------------------------------------------------

    async def pause(
        self,
        which: str,
        *,
        reason: str | None = None,
        until: datetime | timedelta | None = None,
        gate: Gate | Literal["any"] | None = None,
        dry_run: bool = False,
        session: CallersSession = None,
    ) -> Changed:
        """Start nothing there, until a time (or for so long), or until it is resumed."""
        return await self._each(which, gate, dry_run, session, _pause, until=until, reason=reason)

    async def resume(self, which: str, *, dry_run: bool = False, session: CallersSession = None) -> Changed:
        """End a pause; of a pattern those that are paused."""
        return await self._each(which, "pause", dry_run, session, gates.resume)

    async def open(
        self,
        which: str,
        *,
        reason: str | None = None,
        until: datetime | timedelta | None = None,
        gate: Gate | Literal["any"] | None = None,
        dry_run: bool = False,
        session: CallersSession = None,
    ) -> Changed:
        """Open the circuit by hand, until it is closed by hand or a trial after ``until`` goes well."""
        return await self._each(which, gate, dry_run, session, _open, until=until, reason=reason)

    async def close(self, which: str, *, dry_run: bool = False, session: CallersSession = None) -> Changed:
        """Close the circuit by hand; of a pattern those that are not closed."""
        return await self._each(which, "breaker", dry_run, session, gates.close)

    async def reset(
        self,
        which: str,
        *,
        gate: Gate | Literal["any"] | None = "any",
        dry_run: bool = False,
        session: CallersSession = None,
    ) -> Changed:
        """Close the circuit, end cooldown and pause.

        Credentials and policies stay. Of a pattern those stopped.
        """
        return await self._each(which, gate, dry_run, session, _reset)

    async def limit(
        self,
        which: str,
        *,
        limits: Iterable[Limit | str] | Unset | None = UNSET,
        concurrency: int | Unset | None = UNSET,
        breaker: BreakerPolicy | Mapping[str, Any] | Unset = UNSET,
        clear: bool | Iterable[Aspect] = False,
        dry_run: bool = False,
        session: CallersSession = None,
    ) -> Changed:
        """Override what the program declares, at once and for every worker.

        ``limits`` replaces all of them (``"100/min"``, `Limit`; none or None: no limit), ``concurrency`` the
        cap (None: no cap), ``breaker`` some of its members. ``clear`` drops overrides, all or by aspect, before.
        Raises `InvalidInput` for a policy that cannot be meant.
        """
        change = _override(limits, concurrency, breaker)
        dropped = ASPECTS if clear is True else tuple(clear or ())
        if unknown := set(dropped) - set(ASPECTS):
            raise InvalidInput(f"clear={sorted(unknown)!r}: a policy has {', '.join(ASPECTS)}")
        if not change and not dropped:
            raise InvalidInput("nothing to set: give limits, concurrency, breaker or clear")
        fn = _set_policy
        return await self._each(
            which, None, dry_run, session, fn, policies=self._app.policies, change=change, dropped=dropped
        )

    async def _each(
        self,
        which: str,
        gate: Gate | Literal["any"] | None,
        dry_run: bool,  # noqa: FBT001 - passed on
        session: CallersSession,
        fn: Callable[..., Any],
        **options: Any,
    ) -> Changed:
        """Do ``fn(connection, dialect, key, ...)`` to what is meant."""
        keys = await self._meant(which, gate, session)
        if not dry_run:
            for key in sorted(keys, key=lambda k: (-resource_key.depth(k), k)):
                await self._db.write(session, fn, key, **options)
        return Changed(tuple(keys))

    async def _meant(self, which: str, gate: str | None, session: CallersSession) -> builtins.list[str]:
        if not ("*" in which or "?" in which):
            return [resource_key.check(which)]
        resource_key.check_pattern(which)
        keys: builtins.list[str] = []
        while True:
            after = keys[-1] if keys else ""
            found = await self._db.read(session, resource_queries.keys_of, which, gate=gate, after=after)
            keys += found
            if len(found) < resource_queries.KEYS_PAGE:
                return keys


class SyncResources(Face[Resources]):
    """`Resources` for synchronous programs: the same methods, the same arguments."""

    get = blocking(Resources.get)
    list = blocking(Resources.list)
    summary = blocking(Resources.summary)
    why = blocking(Resources.why)
    pause = blocking(Resources.pause)
    resume = blocking(Resources.resume)
    open = blocking(Resources.open)
    close = blocking(Resources.close)
    reset = blocking(Resources.reset)
    limit = blocking(Resources.limit)


# -- one resource, in a transaction --------------------------------------------------------------------------


def _why(c: Connection, d: Dialect, policies: Policies, key: str) -> Why:
    path, now = situation.path_of(c, d, key, policies.for_key)
    return why_resource(path, now, example=resource_queries.first_job(c, d, key))


def _pause(c: Connection, d: Dialect, key: str, *, until: datetime | timedelta | None, reason: str | None) -> None:
    gates.pause(c, d, key, until=_ahead(c, d, until), reason=reason)


def _open(c: Connection, d: Dialect, key: str, *, until: datetime | timedelta | None, reason: str | None) -> None:
    gates.open_(c, d, key, until=_ahead(c, d, until), reason=reason)


def _ahead(c: Connection, d: Dialect, until: datetime | timedelta | None) -> datetime | None:
    if until is None:
        return None
    now = d.now(c)
    at = now + until if isinstance(until, timedelta) else until
    if at.tzinfo is None:
        raise NaiveDatetime(f"until={at.isoformat()} has no time zone: use datetime.now(UTC) or a timedelta")
    if at <= now:
        raise InvalidInput(f"until={at.isoformat()} has passed")
    return at


def _reset(c: Connection, d: Dialect, key: str) -> None:
    gates.warm_up(c, d, key)
    gates.close(c, d, key)
    gates.resume(c, d, key)


def _set_policy(
    c: Connection,
    d: Dialect,
    key: str,
    *,
    policies: Policies,
    change: Mapping[str, Any],
    dropped: Iterable[str],
) -> None:
    resources.ensure(c, d, [key])
    known = resources.lock_waiting(c, d, [key])[key].policy_override or {}
    merged = {name: value for name, value in known.items() if name not in dropped}
    if "breaker" in change:
        merged["breaker"] = {**(merged.get("breaker") or {}), **change["breaker"]}
    merged |= {name: value for name, value in change.items() if name != "breaker"}
    policies.for_key(key).overridden(merged)
    gates.set_policy(c, d, key, merged or None)


def _override(
    limits: Iterable[Limit | str] | Unset | None,
    concurrency: int | Unset | None,
    breaker: BreakerPolicy | Mapping[str, Any] | Unset,
) -> dict[str, Any]:
    """What was given, as the row keeps it."""
    change: dict[str, Any] = {}
    if not isinstance(limits, Unset):
        given = [limits] if isinstance(limits, str) else list(limits or ())
        change["limits"] = [(Limit.parse(one) if isinstance(one, str) else one).to_json() for one in given]
    if not isinstance(concurrency, Unset):
        change["concurrency"] = concurrency
    if isinstance(breaker, BreakerPolicy):
        change["breaker"] = {name: getattr(breaker, name) for name in BreakerPolicy.__slots__}
    elif not isinstance(breaker, Unset):
        change["breaker"] = dict(breaker)
    return change
