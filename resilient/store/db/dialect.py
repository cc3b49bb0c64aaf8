"""Every difference between SQLite and PostgreSQL, each with its reason.

A store function is ``fn(c: Connection, d: Dialect, ...)``: it runs inside the caller's transaction and never commits.
Hot statements are text, written once where both databases agree; `Dialect.sql` fills in table names (``{job}``) and
the few words that differ, and caches the compiled statement. Everything else uses SQLAlchemy's expressions through
`Dialect.execute`, which applies the schema.

Time: `Dialect.now` is the only clock of the store. PostgreSQL's own (``clock_timestamp()``: workers' clocks may be an
hour apart), the host's on SQLite (one host), the injected one under a test clock. Read it after the locks.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from sqlalchemy import Uuid, bindparam, text

from resilient.store.db import tables
from resilient.store.db.direct import Direct, DirectSQLite
from resilient.store.db.pipeline import Query
from resilient.store.db.types import DOCUMENT, UtcDateTime, sqlite_time

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from sqlalchemy import Connection, CursorResult, TextClause
    from sqlalchemy.sql.base import Executable

    Rows = CursorResult[*tuple[Any, ...]]

_TABLES: Final = {t.name.removeprefix("resilient_"): t.name for t in tables.metadata.sorted_tables}
_PARAM: Final = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")
_TIMES: Final = frozenset({"now", "until", "since", "before", "after"})
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")

# Words that differ. `skip`: SQLite has one writer at a time, so there is nobody to skip and no row lock to take.
_WORDS: Final[dict[str, dict[str, str]]] = {
    "postgresql": {
        "skip_locked": "FOR UPDATE SKIP LOCKED",
        "skip_locked_j": "FOR UPDATE OF j SKIP LOCKED",
        "leaf_lock": "FOR NO KEY UPDATE SKIP LOCKED",
        "row_lock": "FOR NO KEY UPDATE",
        "row_lock_o": "FOR NO KEY UPDATE OF o",
        "share_lock": "FOR SHARE SKIP LOCKED",
        "stay_lock": "FOR SHARE",
        "timestamp": "timestamptz",
        "payload": "CAST(payload AS text)",  # decoded once, by the handler's model
    },
    "sqlite": {
        "skip_locked": "",
        "skip_locked_j": "",
        "leaf_lock": "",
        "row_lock": "",
        "row_lock_o": "",
        "share_lock": "",
        "stay_lock": "",
        "timestamp": "text",
        "payload": "CAST(payload AS blob)",  # a byte that is no text must not fail the claim
    },
}


UPGRADE: Final = "resilient db upgrade"


class Dialect:
    """How to talk to one database: its name, schema and clock."""

    def __init__(
        self,
        name: str,
        *,
        schema: str | None = None,
        clock: Callable[[], datetime] | None = None,
        generic_plans: bool = True,
    ) -> None:
        if name not in _WORDS:
            raise ValueError(f"{name!r} is not supported: use a PostgreSQL or SQLite database")
        if schema is not None and not _IDENTIFIER.fullmatch(schema):
            raise ValueError(f"schema {schema!r} is not a plain identifier of at most 63 characters")
        self.name = name
        self.schema = schema
        self.clock = clock
        self.generic_plans = generic_plans
        self.upgrade_with = UPGRADE  # what a person runs for the tables; Django has a command of its own
        self.is_postgresql = name == "postgresql"
        prefix = f'"{schema}".' if schema else ""
        self._words = {short: prefix + full for short, full in _TABLES.items()} | _WORDS[name]
        self._words["scaling"] = f"{prefix}resilient_scaling"  # a view
        self._words["steering"] = _STEERING + (_KEEP_PLANS if generic_plans else "")
        # A guard beside the fence. Of a CASE the planner expects that half of the rows fit; of `=` it expects, without
        # fresh statistics, two such rows, and reads the whole table or partial index for each batch.
        state = f"{self._words['job']}.state"
        for word in ("ready", "running", "blocked"):
            plain = f"{state} = '{word}'"
            guard = f"CASE WHEN {plain} THEN true ELSE false END" if self.is_postgresql else plain
            self._words[f"is_{word}"] = guard
        self._cache, self._driver_cache, self._sqlite_cache = _caches(name, schema, generic_plans)
        self._options = {"schema_translate_map": {None: schema}} if schema else {}

    # -- statements -----------------------------------------------------------------------------------------------

    def sql(self, template: str, **columns: Any) -> TextClause:
        """The statement for ``template``; ``columns`` are the types of its results, where they need one (`ID`, `TIME`).

        Parameters that are named as times are (`_TIMES`, ``*_at``, ``*_until``, ``*_since``).
        """
        key = (template, tuple(columns))
        if (hit := self._cache.get(key)) is not None:
            return hit
        statement = text(self.named(template))
        statement = statement.bindparams(*(bindparam(name, type_=UtcDateTime()) for name in _times(template)))
        if columns:
            statement = statement.columns(**columns)  # type: ignore[assignment]
        self._cache[key] = statement
        return statement

    def named(self, template: str) -> str:
        """``template`` with the names of the tables."""
        return template.format_map(self._words)

    def run(self, c: Connection, template: str, params: Mapping[str, Any] | None = None, **columns: Any) -> Rows:
        """Execute ``template`` (see `sql`)."""
        if isinstance(c, Direct):
            return cast("Rows", c.run(self._query(template), params, columns))
        if isinstance(c, DirectSQLite):
            if (ready := self._sqlite_cache.get(template)) is None:
                ready = self._sqlite_cache[template] = self.named(template), _times(template)
            return cast("Rows", c.run(*ready, params or {}, columns))
        return c.execute(self.sql(template, **columns), dict(params or {}))

    def later(self, c: Connection, template: str, params: Mapping[str, Any] | None = None, **columns: Any) -> Rows:
        """`run`, but perhaps not before the next statement, or the commit: a round trip less.

        For what nobody reads an answer of, or after the next statement only.
        """
        if isinstance(c, Direct):
            return cast("Rows", c.later(self._query(template), params, columns))
        return self.run(c, template, params, **columns)

    def send(self, c: Connection) -> None:
        """Execute what was left for later: its answers are read now."""
        if isinstance(c, Direct):
            c.send()

    def commit(self, c: Connection) -> None:
        """Nothing more is written: commit at once with what waits, where the transaction is the engine's alone.

        Anywhere else, whoever began it ends it.
        """
        if isinstance(c, Direct):
            c.commit()

    def _query(self, template: str) -> Query:
        """The statement for ``template`` as psycopg and libpq read it."""
        hit = self._driver_cache.get(template)
        if hit is None:
            plain, names = self.named(template), list[str]()
            for name in _PARAM.findall(plain):
                if name not in names:
                    names.append(name)
            numbered = _PARAM.sub(lambda one: f"${names.index(one[1]) + 1}", plain).encode()
            named = _PARAM.sub(r"%(\1)s", plain.replace("%", "%%")) if names else plain
            hit = self._driver_cache[template] = Query(named, bool(names), numbered, tuple(names))
        return hit

    def execute(self, c: Connection, statement: Executable, params: Any = None) -> Rows:
        """Execute an SQLAlchemy expression over `tables`, in this app's schema."""
        result: Rows = c.execute(statement, params, execution_options=self._options)
        return result

    # -- time -----------------------------------------------------------------------------------------------------

    def now(self, c: Connection) -> datetime:
        """The one clock; see the top of this file."""
        if self.clock is not None:
            return self.clock()
        if self.is_postgresql:
            now: datetime = self.run(c, "SELECT clock_timestamp() AS now", now=TIME).scalar_one()
            return now
        return datetime.now(UTC)

    def steer(self, c: Connection, how_long: str | None = None) -> datetime:
        """Read the clock, and set index plans for the rest of this transaction of our own (never of a caller's).

        ``how_long``: how long it waits for a lock from now on; by default as the database is set up, mostly for ever.

        Without fresh statistics, or on a small table, PostgreSQL prefers hashing the whole job table over a few
        hundred look-ups by primary key: 5 ms instead of 1.5 for a batch of 320. Prepared statements keep their plan
        (see the top of `direct.py`). A plan that must use what is switched off has a very high cost, and PostgreSQL
        compiles plans of high cost each time (jit): seconds for a statement of 2 ms, so jit is off, too. A process that
        is stopped in the middle must not keep its row locks for ever: PostgreSQL ends the transaction after ten idle
        seconds. All of this ends with the transaction.
        """
        if not self.is_postgresql:
            return self.now(c)
        now: datetime = self.run(c, f"SELECT clock_timestamp() AS now, {_steering(how_long)}", now=TIME).scalar_one()
        return self.clock() if self.clock is not None else now

    def steer_later(self, c: Connection, how_long: str | None = None) -> None:
        """`steer` with the next statement, without reading the clock."""
        if self.is_postgresql:
            self.later(c, f"SELECT {_steering(how_long)}")

    @property
    def now_sql(self) -> str:
        """The clock inside a statement: ``:now`` where the host or a test tells the time."""
        return "clock_timestamp()" if self.is_postgresql and self.clock is None else ":now"

    def host_now(self) -> datetime | None:
        """What to bind as ``:now`` in statements that use `now_sql`; None where the database tells the time."""
        if self.clock is not None:
            return self.clock()
        return None if self.is_postgresql else datetime.now(UTC)

    # -- batches --------------------------------------------------------------------------------------------------
    # A batch travels as one parameter. PostgreSQL takes an array literal (psycopg's list dumper costs more per element
    # than the statement itself); SQLite has no arrays and reads JSON.

    def array(self, param: str, type_: str) -> str:
        """An expression yielding rows of one column ``value`` from the parameter ``param`` made by `pack`."""
        if self.is_postgresql:
            return f"unnest(CAST(:{param} AS {type_}[])) AS value"
        return f"json_each(:{param})"

    def among(self, param: str, type_: str) -> str:
        """A condition on the values of a packed parameter, for which both planners use the index."""
        if self.is_postgresql:
            return f"= ANY(CAST(:{param} AS {type_}[]))"
        return f"IN (SELECT value FROM json_each(:{param}))"

    def chosen(self, query: str) -> str:
        """A condition: among the values of one column of ``query``, which may lock the rows they come from.

        The one form of every statement that changes or locks what a query of its own chooses. As an array it is
        computed once, before anything is locked or changed. As IN (SELECT ...) it is a join, and PostgreSQL runs it
        again for each row it had to wait for (EvalPlanQual): with some plans (over a Memoize, say) it then misses all
        of them but one, without an error; and a LIMIT in it may be exceeded.
        """
        return f"= ANY(ARRAY({query}))" if self.is_postgresql else f"IN ({query})"

    def chosen_rows(self, table: str, conditions: str) -> str:
        """`chosen` where a key has several columns: among the unlocked rows of ``table`` under ``conditions``."""
        row = "ctid" if self.is_postgresql else "rowid"
        return f"{row} {self.chosen(f'SELECT {row} FROM {table} WHERE {conditions} {{leaf_lock}}')}"

    def records(self, param: str, fields: Mapping[str, str]) -> str:
        """A sub-select of ``fields`` (name to PostgreSQL type) from a JSON array of objects in the parameter ``param``.

        The LIMIT keeps PostgreSQL's planner from expecting 100 rows and choosing a hash over the whole job table. It is
        one that no document reaches (1 GB is the most): what is beyond it would be left out without a word.
        """
        if self.is_postgresql:
            shape = ", ".join(f"{name} {type_}" for name, type_ in fields.items())
            return f"(SELECT * FROM json_to_recordset(CAST(:{param} AS json)) AS r({shape}) LIMIT 1000000000)"
        picked = ", ".join(
            # `->` gives a JSON null as the text 'null'; PostgreSQL gives NULL.
            f"nullif(value -> '$.{name}', 'null') AS {name}"
            if type_ in ("json", "jsonb")
            else f"value ->> '$.{name}' AS {name}"
            for name, type_ in fields.items()
        )
        return f"(SELECT {picked} FROM json_each(:{param}))"

    def pack_ids(self, ids: Sequence[UUID]) -> str:
        """Job ids as one parameter. Formatted from their integer: ``str(uuid)`` costs five times as much."""
        if self.is_postgresql:
            return "{" + ",".join([f"{i.int:032x}" for i in ids]) + "}"
        return json.dumps([f"{i.int:032x}" for i in ids])

    def pack_ints(self, values: Sequence[int]) -> str:
        """Integers as one parameter."""
        return ("{%s}" if self.is_postgresql else "[%s]") % ",".join(map(str, values))

    def pack_keys(self, keys: Sequence[str]) -> Any:
        """Resource keys or kinds as one parameter."""
        if self.is_postgresql:  # quoted, because a bare null would be NULL
            text = '","'.join(keys)
            if "\\" in text or text.count('"') > 2 * max(0, len(keys) - 1):  # in a row that somebody wrote by hand
                text = '","'.join(key.replace("\\", r"\\").replace('"', r"\"") for key in keys)
            return f'{{"{text}"}}' if keys else "{}"
        return json.dumps(list(keys))

    def time(self, value: datetime | None) -> str | None:
        """A time inside a JSON document parameter."""
        if value is None:
            return None
        return value.isoformat() if self.is_postgresql else sqlite_time(value)

    def id(self, value: UUID) -> str:
        """An id inside a JSON document or text parameter."""
        return str(value) if self.is_postgresql else value.hex


class _Caches(NamedTuple):
    """Statements by their templates: as SQLAlchemy, psycopg and sqlite3 take them."""

    text: dict[tuple[str, tuple[str, ...]], TextClause]
    psycopg: dict[str, Query]
    sqlite: dict[str, tuple[str, tuple[str, ...]]]


@lru_cache(maxsize=64)
def _caches(_name: str, _schema: str | None, _plans: bool) -> _Caches:  # noqa: FBT001 - a key
    """The caches that all databases with the same name, schema and plans share."""
    return _Caches({}, {}, {})


def _times(template: str) -> tuple[str, ...]:
    """The names of its parameters that are times."""
    names = set(_PARAM.findall(template))
    return tuple(sorted(n for n in names if n in _TIMES or n.endswith(("_at", "_until", "_since"))))


_STEERING: Final = (
    "set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),"
    " set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true),"
    " set_config('idle_in_transaction_session_timeout', '10s', true)"
)  # see `Dialect.steer`


def _steering(how_long: str | None) -> str:
    timeout = "" if how_long is None else f", set_config('lock_timeout', '{how_long}', true)"
    return f"concat({{steering}}{timeout})"


_KEEP_PLANS: Final = ", set_config('plan_cache_mode', 'force_generic_plan', true)"
ID: Final = Uuid()
TIME: Final = UtcDateTime()
JSON: Final = DOCUMENT


# -- locks -------------------------------------------------------------------------------------------------------------

# A program's transaction may lock a job, an ordering key or a workflow for as long as it likes
# (`jobs.cancel(session=)`). What works for many jobs at once, a claim or a batch of results, waits `LOCK_WAIT` for
# each, and then goes on without those that are locked (`engine/run/dispatcher.py`, `engine/run/completer.py`). SQLite
# has one writer and no row locks.
LOCK_WAIT: Final = "1s"
SHORT_LOCK_WAIT: Final = "100ms"  # where somebody else probably has the lock
_LOCK_NOT_AVAILABLE: Final = "55P03"


def is_lock_timeout(error: BaseException) -> bool:
    """Whether a transaction gave up waiting for a lock: it wrote nothing, and is to be repeated carefully."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) == _LOCK_NOT_AVAILABLE


def limit_lock_waits(c: Connection, d: Dialect, how_long: str) -> None:
    """Let this transaction of our own wait no longer than so for each lock; see also `Dialect.steer`."""
    if d.is_postgresql:
        d.later(c, f"SELECT set_config('lock_timeout', '{how_long}', true)")
