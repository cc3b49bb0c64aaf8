"""Rate limits: every statement that writes a rate-limit row.

Rows are locked in one ordered SELECT, by (resource, name), and missing ones made before. Draws are computed
in Python under those locks (`core.gates.rate_limit`): reservations, weights and the server's view in SQL would be a
second implementation of the same rules. Request limits are drawn here, job limits by the claim, which holds
the resource rows and so needs no lock on theirs; the two never touch each other's rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from resilient.core.gates import rate_limit
from resilient.core.gates.rate_limit import FULL, Draw, LimitState
from resilient.store.db.dialect import SHORT_LOCK_WAIT, limit_lock_waits
from resilient.store.db.direct import direct, operation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sqlalchemy import Connection

    from resilient.core.gates.rate_limit import Limit
    from resilient.store.db.dialect import Dialect

LimitId = tuple[str, str]  # resource, name
_ID: Final = {"resource_key": "text", "name": "text"}
_FIELDS: Final = _ID | dict.fromkeys(
    ("tat", "remaining", "reset_at", "observed_at", "unit_seconds", "drawn_at"), "float8"
)
_SAME: Final = " WHERE {rate_limit}.resource_key = v.resource_key AND {rate_limit}.name = v.name"


@dataclass(frozen=True, slots=True)
class Ask:
    """A draw of ``cost`` units from all of ``limits``, or from none.

    ``patience`` seconds may be waited. ``more`` further units are leased if they are there at once. ``lead``: the
    request is not sent before so many seconds from now.
    """

    limits: tuple[tuple[str, Limit], ...]  # (resource, limit)
    cost: float = 1.0
    patience: float = 0.0
    more: int = 0
    lead: float = 0.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """The answer to an `Ask`; ``leased`` further units were drawn. Times in epoch seconds of the database.

    ``tats``: of each limit, after the draw; what `Settled` needs to give units back.
    """

    draw: Draw
    leased: int
    now: float
    tats: tuple[float, ...] = ()


class Settled(NamedTuple):
    """``units`` to draw from a limit without asking, or (negative) to take off a draw that led to ``tat``.

    ``unsent``: a place that was not used (`rate_limit.give_back`), not what an answer says (`rate_limit.refund`).
    """

    resource_key: str
    limit: Limit
    units: float
    tat: float | None = None
    unsent: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What the server said about one limit, and when the request was sent (epoch seconds)."""

    resource_key: str
    limit: Limit
    remaining: float
    reset_at: float
    sent_at: float


def read(c: Connection, d: Dialect, keys: Sequence[str]) -> dict[str, dict[str, LimitState]]:
    """The limit states of these resources by name; limits that were never drawn are absent."""
    within = "= ANY(CAST(:keys AS text[]))" if d.is_postgresql else "IN (SELECT value FROM json_each(:keys))"
    return _by_name(d.run(c, f"{_READ} {within}", {"keys": d.pack_keys(keys)}))


def note(keys: str) -> str:
    """An expression that notes the keys of a query for `read_noted`, which follows in the same transaction."""
    return f"set_config('resilient.keys', CAST(ARRAY({keys}) AS text), true)"


def read_noted(c: Connection, d: Dialect) -> dict[str, dict[str, LimitState]]:
    """`read` of the keys that the statement before it has noted (PostgreSQL); none if it did not come to that."""
    return _by_name(d.run(c, f"{_READ} = ANY(CAST(nullif(current_setting('resilient.keys', true), '') AS text[]))"))


def _by_name(rows: Iterable[Any]) -> dict[str, dict[str, LimitState]]:
    states: dict[str, dict[str, LimitState]] = {}
    for key, name, *numbers in rows:
        states.setdefault(key, {})[name] = LimitState(*numbers)
    return states


_READ: Final = (
    "SELECT resource_key, name, tat, remaining, reset_at, observed_at, unit_seconds, drawn_at FROM {rate_limit}"
    " WHERE resource_key"
)


@direct
@operation("limit")
def draw(
    c: Connection,
    d: Dialect,
    asks: Sequence[Ask],
    settled: Sequence[Settled] = (),
    how_long: str | None = None,
) -> list[Drawn]:
    """Draw for each ask in turn, after settling. ``how_long``: waits for each lock so long (see `db/dialect.py`)."""
    if how_long is not None:
        limit_lock_waits(c, d, how_long)
    return _draw_each(c, d, asks, settled, _lock(c, d, _ids(asks, settled)))


@direct
@operation("limit")
def draw_free(
    c: Connection, d: Dialect, asks: Sequence[Ask], settled: Sequence[Settled]
) -> tuple[list[Drawn | None], list[Settled]]:
    """`draw` without the limits that another transaction holds now.

    Returns None for an ask that needs one of those, and what could not be settled.
    """
    free = _lock_free(c, d, _ids(asks, settled))
    is_free = [all((key, limit.name) in free for key, limit in ask.limits) for ask in asks]
    drawn = iter(
        _draw_each(
            c, d, [ask for ask, is_one in zip(asks, is_free, strict=True) if is_one],
            [one for one in settled if _id(one) in free], free,
        )
    )  # fmt: skip
    rest = [one for one in settled if _id(one) not in free]
    return [next(drawn) if is_one else None for is_one in is_free], rest


def _ids(asks: Sequence[Ask], settled: Sequence[Settled]) -> list[LimitId]:
    ids = {(key, limit.name) for ask in asks for key, limit in ask.limits}
    return sorted(ids | {_id(one) for one in settled})


def _id(one: Settled | Observation) -> LimitId:
    return one.resource_key, one.limit.name


def _draw_each(
    c: Connection, d: Dialect, asks: Sequence[Ask], settled: Sequence[Settled], before: Mapping[LimitId, LimitState]
) -> list[Drawn]:
    """Under the locks of these rows."""
    now = d.now(c).timestamp()
    states = dict(before)
    for one in sorted(settled, key=lambda one: -(one.tat or 0.0)):  # of a queue the last first: then all come back
        id_ = _id(one)
        states[id_] = _settle(one, states[id_], now)
    answers = [_draw(ask, states, now) for ask in asks]
    write(c, d, [(*id_, state) for id_, state in states.items() if state is not before[id_]])
    return answers


def _settle(one: Settled, state: LimitState, now: float) -> LimitState:
    if one.units > 0:
        return rate_limit.charge(one.limit, state, one.units, now)
    if one.unsent and one.tat is not None:
        return rate_limit.give_back(one.limit, state, -one.units, now, one.tat)
    return rate_limit.refund(one.limit, state, -one.units, now, one.tat)


def _draw(ask: Ask, states: dict[LimitId, LimitState], now: float) -> Drawn:
    ids = [(key, limit.name) for key, limit in ask.limits]
    draw = rate_limit.draw(
        [(x, states[i]) for i, (_, x) in zip(ids, ask.limits, strict=True)], ask.cost, now + ask.lead, ask.patience
    )
    states.update(zip(ids, draw.states, strict=True))
    leased = 0
    if draw.granted and ask.more and not draw.wait:
        room = min(rate_limit.available(x, states[key, x.name], now) for key, x in ask.limits)
        leased = min(ask.more, int(room))
        if leased:
            for key, x in ask.limits:
                states[key, x.name] = rate_limit.take(x, states[key, x.name], leased, now)
    return Drawn(draw, leased, now, tuple(states[i].tat for i in ids))


@direct
@operation("limit")
def observe(c: Connection, d: Dialect, observations: Sequence[Observation]) -> None:
    """Take in what the server reported; see `core.gates.rate_limit`. Waits for no row that a program holds."""
    limit_lock_waits(c, d, SHORT_LOCK_WAIT)
    _observe_each(c, d, observations, _lock(c, d, sorted({_id(s) for s in observations})))


@direct
@operation("limit")
def observe_free(c: Connection, d: Dialect, observations: Sequence[Observation]) -> list[Observation]:
    """`observe` without the limits that another transaction holds now; returns what could not be taken in."""
    free = _lock_free(c, d, sorted({_id(s) for s in observations}))
    _observe_each(c, d, [s for s in observations if _id(s) in free], free)
    return [s for s in observations if _id(s) not in free]


def _observe_each(
    c: Connection, d: Dialect, observations: Sequence[Observation], before: Mapping[LimitId, LimitState]
) -> None:
    """Under the locks of these rows."""
    states = dict(before)
    for s in observations:
        id_ = _id(s)
        is_declared = not s.limit.name.startswith("~")
        states[id_] = rate_limit.observe(states[id_], s.remaining, s.reset_at, s.sent_at, is_declared=is_declared)
    write(c, d, [(*id_, state) for id_, state in states.items() if state is not before[id_]])


def lock_all(c: Connection, d: Dialect, keys: Iterable[str]) -> dict[LimitId, LimitState]:
    """Lock what these resources have drawn, in order, and read it; the caller holds the resources' rows.

    Before changes of several, resource by resource: who draws from the path of an account's budget holds the account's
    row first.
    """
    states = read(c, d, sorted(keys))
    return _select_locked(c, d, sorted((key, name) for key, by_name in states.items() for name in by_name))


def forget_stated(c: Connection, d: Dialect, declared: Mapping[str, Sequence[Limit]]) -> None:
    """Drop what answers said is left; ``declared``: the limits of each resource. Otherwise as `lock_all`.

    How much was drawn while the server's word slowed it is not known, so a declared limit counts as just used up. No
    answer to a request from before brings that word back.
    """
    now = d.now(c).timestamp()
    empty = {(key, limit.name): now + limit.capacity * limit.interval for key, of in declared.items() for limit in of}
    after: list[tuple[str, str, LimitState]] = []
    for id_, state in lock_all(c, d, declared).items():
        if state.reset_at is not None:
            tat = min(state.tat, empty.get(id_, 0.0))
            after.append((*id_, state._replace(tat=tat, remaining=None, reset_at=None, observed_at=now)))
    write(c, d, after)


def insert(c: Connection, d: Dialect, ids: Iterable[LimitId]) -> None:
    """Make the missing rows, in lock order."""
    d.later(
        c,
        "INSERT INTO {rate_limit} (resource_key, name)"
        f" SELECT resource_key, name FROM {d.records('doc', _ID)} AS v WHERE true"
        " ON CONFLICT (resource_key, name) DO NOTHING",
        {"doc": json.dumps([{"resource_key": key, "name": name} for key, name in sorted(ids)])},
    )


def write(c: Connection, d: Dialect, states: Sequence[tuple[str, str, LimitState]]) -> None:
    """Write (resource, name, state) of rows the caller holds."""
    if not states:
        return
    doc = [
        {"resource_key": key, "name": name, "tat": s.tat, "remaining": s.remaining, "reset_at": s.reset_at,
         "observed_at": s.observed_at, "unit_seconds": s.interval, "drawn_at": s.drawn_at}
        for key, name, s in states
    ]  # fmt: skip
    d.run(
        c,
        "UPDATE {rate_limit} SET tat = v.tat, remaining = v.remaining, reset_at = v.reset_at,"
        " observed_at = v.observed_at, unit_seconds = v.unit_seconds, drawn_at = v.drawn_at"
        f" FROM {d.records('doc', _FIELDS)} AS v" + _SAME,
        {"doc": json.dumps(doc)},
    )


def write_tats(c: Connection, d: Dialect, states: Sequence[tuple[str, str, LimitState]]) -> None:
    """The hot half of `write`: what the claim's draw of job limits changes."""
    if not states:
        return
    if d.is_postgresql:  # array literals cost a third of a JSON document; LIMIT as in `Dialect.records`
        source = (
            "(SELECT * FROM unnest(CAST(:keys AS text[]), CAST(:names AS text[]), CAST(:tats AS float8[]),"
            " CAST(:intervals AS float8[]), CAST(:drawn AS float8[]))"
            " AS u(resource_key, name, tat, unit_seconds, drawn_at) LIMIT 1000000000)"
        )
        params: dict[str, Any] = {
            "keys": d.pack_keys([key for key, _, _ in states]),
            "names": d.pack_keys([name for _, name, _ in states]),
            "tats": _floats(s.tat for _, _, s in states),
            "intervals": _floats(s.interval for _, _, s in states),
            "drawn": _floats(s.drawn_at for _, _, s in states),
        }
    else:
        source = d.records("doc", _ID | dict.fromkeys(("tat", "unit_seconds", "drawn_at"), "float8"))
        doc = [
            {"resource_key": k, "name": n, "tat": s.tat, "unit_seconds": s.interval, "drawn_at": s.drawn_at}
            for k, n, s in states
        ]
        params = {"doc": json.dumps(doc)}
    d.later(
        c,
        "UPDATE {rate_limit} SET tat = v.tat, unit_seconds = v.unit_seconds, drawn_at = v.drawn_at"
        f" FROM {source} AS v" + _SAME,
        params,
    )


def _floats(values: Iterable[float | None]) -> str:
    """PostgreSQL's literal of an array."""
    return "{" + ",".join("NULL" if value is None else repr(value) for value in values) + "}"


def _lock(c: Connection, d: Dialect, ids: Sequence[LimitId]) -> dict[LimitId, LimitState]:
    """Lock rows in order, making the missing ones; exactly these rows, or the claim's would be locked too."""
    states = _select_locked(c, d, ids)
    if len(states) < len(ids):
        insert(c, d, [i for i in ids if i not in states])
        states = _select_locked(c, d, ids)
    return {i: states.get(i, FULL) for i in ids}


def _lock_free(c: Connection, d: Dialect, ids: Sequence[LimitId]) -> dict[LimitId, LimitState]:
    """`_lock` those of the rows that no other transaction holds now."""
    limit_lock_waits(c, d, SHORT_LOCK_WAIT)
    there = read(c, d, sorted({key for key, _ in ids}))  # to make one that is held would wait
    insert(c, d, [(key, name) for key, name in ids if name not in there.get(key, {})])
    return _select_locked(c, d, ids, skip=True)


def _select_locked(
    c: Connection, d: Dialect, ids: Sequence[LimitId], *, skip: bool = False
) -> dict[LimitId, LimitState]:
    lock = " FOR NO KEY UPDATE OF l" + (" SKIP LOCKED" if skip else "") if d.is_postgresql else ""
    rows = d.run(
        c,
        "SELECT l.resource_key, l.name, l.tat, l.remaining, l.reset_at, l.observed_at, l.unit_seconds, l.drawn_at"
        " FROM {rate_limit} l"
        f" JOIN {d.records('doc', _ID)} AS v ON l.resource_key = v.resource_key AND l.name = v.name"
        f" ORDER BY l.resource_key, l.name{lock}",
        {"doc": json.dumps([{"resource_key": key, "name": name} for key, name in ids])},
    )
    return {(key, name): LimitState(*numbers) for key, name, *numbers in rows}
