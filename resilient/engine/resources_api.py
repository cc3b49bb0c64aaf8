"""`app.resources`: what is stopped and why; stop it, let it go, limit it. `app.sync.resources`: synchronous.

A method that changes takes a key, which need not have been used yet, or a pattern (``github/*``). That means the
resources in use and those with jobs in the queue that match it now, not what comes later (for that, change what is
above them: ``github``); with ``gate`` only those it stops. Each resource is changed in a transaction of its own
(with ``session=`` all in the caller's, deepest first, as everybody locks them), if it is still meant then. `Bulk`
bounds what a pattern does: stopped since when, how many, how many a second, only a look.
Whatever opens a gate releases the turns that wait for it; the load comes back step by step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from resilient.core import resource_key
from resilient.core.changed import Changed
from resilient.core.errors import InvalidInput, NaiveDatetime
from resilient.core.limit import Limit
from resilient.core.misfit import explained_calls
from resilient.core.phrases import moment
from resilient.core.policy import BreakerPolicy
from resilient.core.why import Why, why_resource
from resilient.engine.bulk import spacing_of
from resilient.engine.sessions import CallersSession, Face, Transactions, blocking
from resilient.store import gates, resource_queries, resources, situation
from resilient.store.edits import UNSET, Unset

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime
    from typing import Unpack

    from sqlalchemy import Connection

    from resilient.core.policy import Policies
    from resilient.core.records import ResourceInfo, StoppedGroup
    from resilient.engine.app import Resilient
    from resilient.store.dialect import Dialect
    from resilient.store.resource_queries import Gate

Aspect = Literal["limits", "concurrency", "breaker"]
ASPECTS: Final = ("limits", "concurrency", "breaker")


class Bulk(TypedDict, total=False):
    """What bounds a change of many resources.

    ``dry_run`` only tells which are meant. ``rate`` (``"10/s"``, or a number a second) spreads the changes: the call
    lasts as long, and may be broken off and repeated. Of a pattern, ``stopped_after`` and ``stopped_before`` (a time,
    or how long ago) mean only those that a gate stopped in that time, ``limit`` at most so many.
    """

    dry_run: bool
    rate: float | str | None
    limit: int | None
    stopped_after: datetime | timedelta | None
    stopped_before: datetime | timedelta | None


@explained_calls("app.resources")
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
        session: CallersSession = None,
        **bulk: Unpack[Bulk],
    ) -> Changed:
        """Start nothing there, until a time (or for so long), or until it is resumed."""
        return await self._each(which, gate, bulk, session, _pause, until=until, reason=reason)

    async def resume(self, which: str, *, session: CallersSession = None, **bulk: Unpack[Bulk]) -> Changed:
        """End a pause; of a pattern those that are paused."""
        return await self._each(which, "pause", bulk, session, gates.resume)

    async def open(
        self,
        which: str,
        *,
        reason: str | None = None,
        until: datetime | timedelta | None = None,
        gate: Gate | Literal["any"] | None = None,
        session: CallersSession = None,
        **bulk: Unpack[Bulk],
    ) -> Changed:
        """Open the circuit by hand, until it is closed by hand or a probe after ``until`` goes well."""
        return await self._each(which, gate, bulk, session, _open, until=until, reason=reason)

    async def close(self, which: str, *, session: CallersSession = None, **bulk: Unpack[Bulk]) -> Changed:
        """Close the circuit by hand; of a pattern those that are not closed."""
        return await self._each(which, "breaker", bulk, session, gates.close)

    async def reset(
        self,
        which: str,
        *,
        gate: Gate | Literal["any"] | None = "any",
        session: CallersSession = None,
        **bulk: Unpack[Bulk],
    ) -> Changed:
        """Close the circuit, end cooldown and pause.

        Credentials and policies stay. Of a pattern those stopped.
        """
        return await self._each(which, gate, bulk, session, _reset)

    async def limit(
        self,
        which: str,
        *,
        limits: Iterable[Limit | str] | Unset | None = UNSET,
        concurrency: int | Unset | None = UNSET,
        breaker: BreakerPolicy | Mapping[str, Any] | Unset = UNSET,
        clear: bool | Iterable[Aspect] = False,
        session: CallersSession = None,
        **bulk: Unpack[Bulk],
    ) -> Changed:
        """Override what the program declares, at once and for every worker.

        ``limits`` replaces all of them (``"100/min"``, `Limit`; none or None: no limit), ``concurrency`` the
        cap (None: no cap), ``breaker`` some of its members. ``clear`` drops overrides, all or by aspect, before.
        Raises `InvalidInput` for a policy that cannot be meant.
        """
        change = _override(limits, concurrency, breaker)
        dropped = ASPECTS if clear is True else tuple(clear or ())
        if unknown := set(dropped) - set(ASPECTS):
            raise InvalidInput(f"nothing to clear is called {min(unknown)!r}: a policy has {', '.join(ASPECTS)}")
        if not change and not dropped:
            raise InvalidInput("nothing to set: give limits, concurrency, breaker or clear")
        fn = _set_policy
        return await self._each(
            which, None, bulk, session, fn, policies=self._app.policies, change=change, dropped=dropped
        )

    async def _each(
        self,
        which: str,
        gate: Gate | Literal["any"] | None,
        bulk: Bulk,
        session: CallersSession,
        fn: Callable[..., Any],
        **options: Any,
    ) -> Changed:
        """Do ``fn(connection, dialect, key, ...)`` to what is meant."""
        spacing = spacing_of(bulk.get("rate"))
        if spacing is not None and session is not None:
            raise InvalidInput("rate= spreads the changes over transactions of their own: leave out session=")
        meant = await self._meant(which, gate, bulk, session)
        if bulk.get("dry_run") or not meant.keys:
            return _changed(meant, meant.keys)
        done, began = [], time.monotonic()
        for number, key in enumerate(sorted(meant.keys, key=lambda k: (-resource_key.depth(k), k))):
            if spacing is not None and (ahead := began + number * spacing.total_seconds() - time.monotonic()) > 0:
                await self._db.rest(ahead)
            if await self._db.write(session, _if_meant, meant, key, fn, options):
                done.append(key)
        return _changed(meant, done)

    async def _meant(self, which: str, gate: str | None, bulk: Bulk, session: CallersSession) -> _Meant:
        if not ("*" in which or "?" in which):
            if narrowed := {"stopped_after", "stopped_before", "limit"} & bulk.keys():
                raise InvalidInput(f"{min(narrowed)}= narrows a pattern; {which!r} is one key")
            return _Meant([resource_key.check(which)])
        resource_key.check_pattern(which)
        most = bulk.get("limit")
        if most is not None and most < 1:
            raise InvalidInput(f"limit={most}: at least 1")
        between = await self._db.read(session, _between, bulk.get("stopped_after"), bulk.get("stopped_before"))
        found = _Meant([], gate, between)
        while most is None or len(found.keys) < most:
            after, page = found.keys[-1] if found.keys else "", resource_queries.KEYS_PAGE
            page = page if most is None else min(page, most - len(found.keys))
            keys = await self._db.read(
                session, resource_queries.keys_of, which, gate=gate, between=between, after=after, limit=page
            )
            found.keys.extend(keys)
            if len(keys) < page:
                break
        if not found.conditional:  # what nobody used yet is stopped by nothing
            queued = await self._db.read(session, resource_queries.queued_keys, which)
            found.queued = frozenset(queued if most is None else queued[: most - len(found.keys)])
            found.keys.extend(found.queued)
        return found


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


@dataclass(slots=True)
class _Meant:
    """The resources that are meant, and by what: they are looked at again before each is changed."""

    keys: list[str]
    gate: str | None = None
    between: resource_queries.Between = (None, None)
    queued: frozenset[str] = frozenset()  # those of them that only have jobs

    @property
    def conditional(self) -> bool:
        return self.gate is not None or self.between != (None, None)


def _changed(meant: _Meant, done: Iterable[str]) -> Changed:
    keys = tuple(sorted(done))
    return Changed(keys, tuple(key for key in keys if key in meant.queued))


def _if_meant(
    c: Connection, d: Dialect, meant: _Meant, key: str, fn: Callable[..., Any], options: Mapping[str, Any]
) -> bool:
    """Change one resource, unless what was asked for does not hold of it any more."""
    if meant.conditional and not resource_queries.keys_of(c, d, key, gate=meant.gate, between=meant.between):
        return False
    fn(c, d, key, **options)
    return True


def _between(c: Connection, d: Dialect, first: datetime | timedelta | None, last: Any) -> resource_queries.Between:
    now = d.now(c)
    return _ago("stopped_after", first, now), _ago("stopped_before", last, now)


def _ago(name: str, at: datetime | timedelta | None, now: datetime) -> datetime | None:
    if isinstance(at, timedelta):
        return now - at
    if at is not None and at.tzinfo is None:
        raise NaiveDatetime(f"{name}={at.isoformat()} has no time zone: use datetime.now(UTC) or a timedelta (ago)")
    return at


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
        raise InvalidInput(f"until={moment(at)} has passed")
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
    known = resources.lock_waiting(c, d, [key])[key].policy_override
    known = known if isinstance(known, dict) else {}
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
