"""`app.resources`: what is stopped and why; stop it, let it go, limit it. `app.sync.resources`: synchronous.

A method that changes takes a key, which need not have been used yet, or a pattern (``github/*``). A pattern means the
resources that match it now, in use or with jobs in the queue, and none that comes later (for those, change what is
above them: ``github``). With ``gate`` a key or a pattern means only what this gate stops. Each resource is changed in a
transaction of its own, which looks once more whether the gate stops it; with ``session=`` all are changed in the
caller's transaction, the deepest first, as everybody locks them. `Bulk` bounds a change: stopped since when, how many,
how many a second, only a look. Whatever opens a gate releases the turns that wait for it; the load comes back step by
step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict

from resilient.core.base import resource_key
from resilient.core.base.errors import InvalidInput, NaiveDatetime
from resilient.core.base.instants import add, in_utc
from resilient.core.base.misfit import check_storable, explained_calls
from resilient.core.base.phrases import moment
from resilient.core.gates.policy import BreakerPolicy
from resilient.core.gates.rate_limit import Limit
from resilient.core.inspect.why import Why, why_resource
from resilient.core.jobs.records import Changed
from resilient.engine.ground.audited import audited
from resilient.engine.ground.sessions import CallersSession, SyncFacade, Transactions, blocking
from resilient.engine.jobs.api import spacing_of
from resilient.store.gates import controls as gates
from resilient.store.gates import limits, resources
from resilient.store.inspect import resources as resource_queries
from resilient.store.inspect import why
from resilient.store.jobs.changes import UNSET, Unset

if TYPE_CHECKING:
    import builtins
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from datetime import datetime
    from typing import Unpack

    from sqlalchemy import Connection

    from resilient.core.gates.policy import Policies
    from resilient.core.inspect.whoami import RequestTest
    from resilient.core.jobs.records import ResourceInfo, StoppedGroup
    from resilient.engine.ground.ground import Ground
    from resilient.store.db.dialect import Dialect
    from resilient.store.inspect.resources import Gate


class TestSenders(NamedTuple):
    """Two functions that send a test request: on the app's loop, and in a thread, where its coroutine never waits."""

    on_loop: Callable[[str], Awaitable[RequestTest]]
    in_threads: Callable[[str], Awaitable[RequestTest]]


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

    def __init__(self, ground: Ground, tests: TestSenders, *, here: bool = False) -> None:
        self._ground, self._db = ground, Transactions(ground, here=here)
        self._tests, self._send_test = tests, tests.in_threads if here else tests.on_loop

    @property
    def sync(self) -> SyncResources:
        """The same for synchronous programs."""
        return SyncResources(Resources(self._ground, self._tests, here=True))

    # -- looking ---------------------------------------------------------------------------------------------

    async def get(self, key: str, *, session: CallersSession = None) -> ResourceInfo:
        """One resource; one that was never used stops nothing."""
        return await self._db.read(session, resource_queries.get, resource_key.check_stored(key))

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

        With ``gate`` only those that it stops. The next page is ``after`` the last key.
        """
        if pattern is not None:
            resource_key.check_pattern(pattern)
        check_storable("after", after or "")
        return await self._db.read(session, resource_queries.page, pattern=pattern, gate=gate, limit=limit, after=after)

    async def summary(self, *, session: CallersSession = None) -> builtins.list[StoppedGroup]:
        """What is stopped, grouped by provider, gate and code: the answer at three in the morning."""
        return await self._db.read(session, resource_queries.summary)

    async def why(self, key: str, *, session: CallersSession = None) -> Why:
        """Why the jobs of a resource are not running, and when they will."""
        return await self._db.read(session, _why, self._ground.policies, resource_key.check_stored(key))

    # -- trying ----------------------------------------------------------------------------------------------

    @audited("resources test")
    async def test(self, key: str) -> RequestTest:
        """Send the harmless request that the provider's facts name (``whoami=``), as a job of this resource would.

        It takes the account's credentials, and every gate may refuse it; where a circuit is due, it is its probe. How
        it ended counts as that of any other request.

        Raises `ResourceStopped` if a gate refuses it, `ConnectionNotFound`, and `InvalidInput` where the facts name
        no such request.
        """
        return await self._send_test(key)

    # -- changing --------------------------------------------------------------------------------------------

    @audited("resources pause")
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
        """Start no jobs of a resource until a time (or for so long), or until it is resumed."""
        return await self._each(which, gate, bulk, session, _pause, until=until, reason=_storable(reason))

    @audited("resources resume")
    async def resume(self, which: str, *, session: CallersSession = None, **bulk: Unpack[Bulk]) -> Changed:
        """End a pause; of a pattern those that are paused."""
        return await self._each(which, _of_a_pattern(which, "pause"), bulk, session, gates.resume)

    @audited("resources open")
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
        return await self._each(which, gate, bulk, session, _open, until=until, reason=_storable(reason))

    @audited("resources close")
    async def close(self, which: str, *, session: CallersSession = None, **bulk: Unpack[Bulk]) -> Changed:
        """Close the circuit by hand; of a pattern those that are not closed."""
        return await self._each(which, _of_a_pattern(which, "breaker"), bulk, session, gates.close)

    @audited("resources reset")
    async def reset(
        self,
        which: str,
        *,
        gate: Gate | Literal["any"] | Unset | None = UNSET,
        session: CallersSession = None,
        **bulk: Unpack[Bulk],
    ) -> Changed:
        """Close the circuit, end cooldown and pause: all three, also with ``gate``.

        What answers said is left of its limits is forgotten. Credentials and policies stay. Without ``gate`` a pattern
        means those that are stopped, by any gate.
        """
        stops = _of_a_pattern(which, "any") if isinstance(gate, Unset) else gate
        return await self._each(which, stops, bulk, session, _reset, policies=self._ground.policies)

    @audited("resources limit")
    async def limit(
        self,
        which: str,
        *,
        limits: Iterable[Limit | str] | Unset | None = UNSET,
        concurrency: int | Unset | None = UNSET,
        breaker: BreakerPolicy | Mapping[str, Any] | Unset = UNSET,
        clear: bool | Aspect | Iterable[Aspect] = False,
        forget: bool = False,
        session: CallersSession = None,
        **bulk: Unpack[Bulk],
    ) -> Changed:
        """Override what the program declares, at once and for every worker.

        ``limits`` replaces all its limits (``"100/min"``, `Limit`; an empty list or None: no limit), ``concurrency``
        replaces its cap (None: no cap), ``breaker`` replaces the members that are given. ``clear`` drops the overrides
        that were there (True: all; or by aspect) before that. ``forget`` drops the limit that throttles taught; the
        next throttle teaches one again.
        Raises `InvalidInput` for a policy that cannot be meant.
        """
        change = _override(limits, concurrency, breaker)
        dropped = ASPECTS if clear is True else (clear,) if isinstance(clear, str) else tuple(clear or ())
        if unknown := [aspect for aspect in dropped if aspect not in ASPECTS]:
            raise InvalidInput(f"nothing to clear is called {unknown[0]!r}: a policy has {', '.join(ASPECTS)}")
        if not change and not dropped and not forget:
            raise InvalidInput("nothing to set: give limits, concurrency, breaker, clear or forget")
        fn = _set_policy
        return await self._each(
            which, None, bulk, session, fn, policies=self._ground.policies, change=change, dropped=dropped,
            forget=forget,
        )  # fmt: skip

    async def _each(
        self,
        which: str,
        gate: Gate | Literal["any"] | None,
        bulk: Bulk,
        session: CallersSession,
        fn: Callable[..., Any],
        **options: Any,
    ) -> Changed:
        """Call ``fn(connection, dialect, key, ...)`` for each resource that is meant; returns what was changed."""
        spacing = spacing_of(bulk.get("rate"))
        if spacing is not None and session is not None:
            raise InvalidInput("rate= spreads the changes over transactions of their own: leave out session=")
        selection = await self._select(which, gate, bulk, session)
        if bulk.get("dry_run") or not selection.keys:
            return _changed(selection, selection.keys)
        done, began = [], time.monotonic()
        for number, key in enumerate(sorted(selection.keys, key=lambda k: (-resource_key.depth(k), k))):
            if spacing is not None and (ahead := began + number * spacing.total_seconds() - time.monotonic()) > 0:
                await self._db.rest(ahead)
            if await self._db.write(session, _if_selected, selection, key, fn, options):
                done.append(key)
        return _changed(selection, done)

    async def _select(self, which: str, gate: str | None, bulk: Bulk, session: CallersSession) -> _Selection:
        if not _is_pattern(which):
            if narrow := next((n for n in ("limit", "stopped_after", "stopped_before") if bulk.get(n) is not None), ""):
                raise InvalidInput(f"{narrow}= narrows a pattern; {which!r} is one key")
            key = resource_key.check_stored(which)
            if gate is None:
                return _Selection([key])
            return _Selection(await self._db.read(session, resource_queries.keys_of, key, gate=gate), gate)
        resource_key.check_pattern(which)
        most = bulk.get("limit")
        if most is not None and most < 1:
            raise InvalidInput(f"limit={most}: at least 1")
        between = await self._db.read(session, _between, bulk.get("stopped_after"), bulk.get("stopped_before"))
        selection = _Selection([], gate, between)
        while most is None or len(selection.keys) < most:
            after, page = selection.keys[-1] if selection.keys else "", resource_queries.KEYS_PAGE
            page = page if most is None else min(page, most - len(selection.keys))
            keys = await self._db.read(
                session, resource_queries.keys_of, which, gate=gate, between=between, after=after, limit=page
            )
            selection.keys.extend(keys)
            if len(keys) < page:
                break
        if not selection.conditional:  # what nobody used yet is stopped by nothing
            queued = await self._db.read(session, resource_queries.queued_keys, which)
            selection.queued = frozenset(queued if most is None else queued[: most - len(selection.keys)])
            selection.keys.extend(selection.queued)
        return selection


class SyncResources(SyncFacade[Resources]):
    """`Resources` for synchronous programs: the same methods, the same arguments."""

    get = blocking(Resources.get)
    list = blocking(Resources.list)
    summary = blocking(Resources.summary)
    why = blocking(Resources.why)
    test = blocking(Resources.test)
    pause = blocking(Resources.pause)
    resume = blocking(Resources.resume)
    open = blocking(Resources.open)
    close = blocking(Resources.close)
    reset = blocking(Resources.reset)
    limit = blocking(Resources.limit)


def _is_pattern(which: str) -> bool:
    return "*" in which or "?" in which


def _of_a_pattern(which: str, gate: Gate | Literal["any"]) -> Gate | Literal["any"] | None:
    """The gate that stops those of a pattern which a method is for; a key is changed whatever stops it."""
    return gate if _is_pattern(which) else None


@dataclass(slots=True)
class _Selection:
    """The keys that a call means, and its conditions: each is checked once more before its change."""

    keys: list[str]
    gate: str | None = None
    between: resource_queries.Between = (None, None)
    queued: frozenset[str] = frozenset()  # keys that have jobs and were never used

    @property
    def conditional(self) -> bool:
        return self.gate is not None or self.between != (None, None)


def _changed(selection: _Selection, done: Iterable[str]) -> Changed:
    keys = tuple(sorted(done))
    return Changed(keys, tuple(key for key in keys if key in selection.queued))


def _if_selected(
    c: Connection, d: Dialect, selection: _Selection, key: str, fn: Callable[..., Any], options: Mapping[str, Any]
) -> bool:
    """Change one resource, unless what was asked for does not hold of it any more."""
    if selection.conditional and not resource_queries.keys_of(
        c, d, key, gate=selection.gate, between=selection.between
    ):
        return False
    fn(c, d, key, **options)
    return True


def _between(c: Connection, d: Dialect, first: datetime | timedelta | None, last: Any) -> resource_queries.Between:
    now = d.now(c)
    return _ago("stopped_after", first, now), _ago("stopped_before", last, now)


def _ago(name: str, at: datetime | timedelta | None, now: datetime) -> datetime | None:
    if isinstance(at, timedelta):
        return add(now, -at)
    if at is not None and at.tzinfo is None:
        raise NaiveDatetime(f"{name}={at.isoformat()} has no time zone: use datetime.now(UTC) or a timedelta (ago)")
    return None if at is None else in_utc(at)


# -- one resource, in a transaction --------------------------------------------------------------------------


def _why(c: Connection, d: Dialect, policies: Policies, key: str) -> Why:
    path, now = why.path_of(c, d, key, policies.for_key)
    return why_resource(path, now, example=resource_queries.first_job(c, d, key))


def _storable(reason: str | None) -> str | None:
    return None if reason is None else check_storable("reason", reason)


def _pause(c: Connection, d: Dialect, key: str, *, until: datetime | timedelta | None, reason: str | None) -> None:
    gates.pause(c, d, key, until=_ahead(c, d, until), reason=reason)


def _open(c: Connection, d: Dialect, key: str, *, until: datetime | timedelta | None, reason: str | None) -> None:
    gates.open_(c, d, key, until=_ahead(c, d, until), reason=reason)


def _ahead(c: Connection, d: Dialect, until: datetime | timedelta | None) -> datetime | None:
    if until is None:
        return None
    now = d.now(c)
    at = add(now, until) if isinstance(until, timedelta) else until
    if at.tzinfo is None:
        raise NaiveDatetime(f"until={at.isoformat()} has no time zone: use datetime.now(UTC) or a timedelta")
    at = in_utc(at)
    if at <= now:
        raise InvalidInput(f"until={moment(at)} has passed")
    return at


def _reset(c: Connection, d: Dialect, key: str, *, policies: Policies) -> None:
    resources.ensure(c, d, [key])
    keys = [*resources.budgets_of(c, d, key), key]
    rows = resources.lock_waiting(c, d, keys)
    declared = {one: policies.for_key(one, facts.policy_override).request_limits for one, facts in rows.items()}
    limits.forget_stated(c, d, declared)
    for one in keys:
        gates.warm_up(c, d, one)
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
    forget: bool,
) -> None:
    resources.ensure(c, d, [key])
    if forget:
        gates.forget(c, d, key)
    if not change and not dropped:
        return
    override = resources.lock_waiting(c, d, [key])[key].policy_override
    override = override if isinstance(override, dict) else {}
    merged = {name: value for name, value in override.items() if name not in dropped}
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
    """The arguments of `Resources.limit` as the row keeps them."""
    change: dict[str, Any] = {}
    if not isinstance(limits, Unset):
        items = [limits] if isinstance(limits, str) else list(limits or ())
        change["limits"] = [(Limit.parse(one) if isinstance(one, str) else one).to_json() for one in items]
    if not isinstance(concurrency, Unset):
        change["concurrency"] = concurrency
    if isinstance(breaker, BreakerPolicy):
        change["breaker"] = {name: getattr(breaker, name) for name in BreakerPolicy.__slots__}
    elif not isinstance(breaker, Unset):
        change["breaker"] = dict(breaker)
    return change
