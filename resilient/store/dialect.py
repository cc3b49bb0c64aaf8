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
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import Uuid, bindparam, text

from resilient.store import tables
from resilient.store.direct import Direct
from resilient.store.types import DOCUMENT, SQLITE_FORMAT, UtcDateTime

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
        "timestamp": "text",
        "payload": "CAST(payload AS blob)",  # a byte that is no text must not fail the claim
    },
}


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
        self.is_postgresql = name == "postgresql"
        prefix = f'"{schema}".' if schema else ""
        self._words = {short: prefix + full for short, full in _TABLES.items()} | _WORDS[name]
        self._words["steering"] = _STEERING + (_KEEP_PLANS if generic_plans else "")
        # A guard beside the fence. As a CASE the planner takes it for a coin toss; as `=` it would, without fresh
        # statistics, expect two such rows and walk the whole table or partial index for each batch.
        state = f"{self._words['job']}.state"
        for word in ("ready", "running", "blocked"):
            plain = f"{state} = '{word}'"
            guard = f"CASE WHEN {plain} THEN true ELSE false END" if self.is_postgresql else plain
            self._words[f"is_{word}"] = guard
        self._cache: dict[tuple[str, tuple[str, ...]], TextClause] = {}
        self._driver_cache: dict[str, tuple[str, bool]] = {}
        self._options = {"schema_translate_map": {None: schema}} if schema else {}

    # -- statements -----------------------------------------------------------------------------------------------

    def sql(self, template: str, **columns: Any) -> TextClause:
        """The statement for ``template``; ``columns`` are the types of its results, where they need one (`ID`, `TIME`).

        Parameters that are named as times are (`_TIMES`, ``*_at``, ``*_until``, ``*_since``).
        """
        key = (template, tuple(columns))
        if (known := self._cache.get(key)) is not None:
            return known
        statement = text(self.named(template))
        times = {
            name for name in _PARAM.findall(template) if name in _TIMES or name.endswith(("_at", "_until", "_since"))
        }
        statement = statement.bindparams(*(bindparam(name, type_=UtcDateTime()) for name in sorted(times)))
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
            statement, has_params = self._driver_sql(template)
            return cast("Rows", c.run(statement, params if has_params else None, columns))
        return c.execute(self.sql(template, **columns), dict(params or {}))

    def _driver_sql(self, template: str) -> tuple[str, bool]:
        """The statement for ``template`` as psycopg reads it, and whether it has parameters (else a % is a %)."""
        known = self._driver_cache.get(template)
        if known is None:
            plain = self.named(template)
            statement, count = _PARAM.subn(r"%(\1)s", plain.replace("%", "%%"))
            known = self._driver_cache[template] = (statement, True) if count else (plain, False)
        return known

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
        """The clock, and index plans for the rest of this transaction of our own (never of a caller's).

        ``how_long``: how long it waits for a lock from now on; by default as the database says, mostly for ever.

        Without fresh statistics, or on a small table, PostgreSQL prefers hashing the whole job table over a few
        hundred look-ups by primary key: 5 ms instead of 1.5 for a batch of 320. Prepared statements keep their plan
        (see the top of `direct.py`). What is steered away from counts as very
        dear, which would have PostgreSQL compile such a plan each time (jit): seconds for a statement of 2 ms. A
        process that is stopped in the middle must not keep its row locks for ever: PostgreSQL ends the transaction
        after ten idle seconds. All of this ends with the transaction.
        """
        if not self.is_postgresql:
            return self.now(c)
        patience = "" if how_long is None else f", set_config('lock_timeout', '{how_long}', true)"
        now: datetime = self.run(
            c, f"SELECT clock_timestamp() AS now, concat({{steering}}{patience})", now=TIME
        ).scalar_one()
        return self.clock() if self.clock is not None else now

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
        again for each row it had to wait for (EvalPlanQual): with some plans (over a Memoize, say) it then finds all
        but one of them gone, and leaves them out without a word; and a LIMIT in it may be passed.
        """
        return f"= ANY(ARRAY({query}))" if self.is_postgresql else f"IN ({query})"

    def records(self, param: str, fields: Mapping[str, str]) -> str:
        """A sub-select of ``fields`` (name to PostgreSQL type) from a JSON array of objects in the parameter ``param``.

        The LIMIT keeps PostgreSQL's planner from expecting 100 rows and choosing a hash over the whole job table.
        """
        if self.is_postgresql:
            shape = ", ".join(f"{name} {type_}" for name, type_ in fields.items())
            return f"(SELECT * FROM json_to_recordset(CAST(:{param} AS json)) AS r({shape}) LIMIT 100000)"
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
        return value.isoformat() if self.is_postgresql else value.astimezone(UTC).strftime(SQLITE_FORMAT)

    def id(self, value: UUID) -> str:
        """An id inside a JSON document or text parameter."""
        return str(value) if self.is_postgresql else value.hex


_STEERING: Final = (
    "set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),"
    " set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true),"
    " set_config('idle_in_transaction_session_timeout', '10s', true)"
)  # see `Dialect.steer`
_KEEP_PLANS: Final = ", set_config('plan_cache_mode', 'force_generic_plan', true)"
ID: Final = Uuid()
TIME: Final = UtcDateTime()
JSON: Final = DOCUMENT
