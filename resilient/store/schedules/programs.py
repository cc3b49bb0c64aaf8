"""Programs whose workers run, and what each of them declares: none takes away what another one still needs.

A program is a set of declarations: two versions are two programs, a hundred workers of one version are one. Its row is
a chore's, named after the declarations. `next_at` is when the program counts as gone, unless a worker of it looks again
before. Nobody waits here: whoever comes second finds that it is done.
"""

from __future__ import annotations

import json
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from resilient.core.schedules import schedule
from resilient.store.db.dialect import JSON, TIME

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import Connection

    from resilient.core.schedules.schedule import Spec
    from resilient.store.db.dialect import Dialect

PREFIX: Final = "engine:program:"
LOOK: Final = timedelta(seconds=20)  # each process looks that often
GONE: Final = timedelta(seconds=60)  # after its last look


def note(c: Connection, d: Dialect, declared: Mapping[str, tuple[str, Spec]]) -> bool | None:
    """Note that workers of this program run; returns whether it counted as running so far.

    None: another process of it has just noted that.
    """
    digests, now = _digests(declared), d.now(c)
    params = {"name": _name(digests), "now": now, "until": now + GONE}
    sql = "SELECT next_at FROM {schedule} WHERE name = :name"
    until: datetime | None = d.run(c, sql, params, next_at=TIME).scalar()
    if until is None:
        doc = "CAST(:spec AS json)" if d.is_postgresql else ":spec"
        d.run(
            c,
            f"INSERT INTO {{schedule}} (name, spec, next_at, updated_at) VALUES (:name, {doc}, :until, :now)"
            " ON CONFLICT (name) DO NOTHING",
            {**params, "spec": json.dumps({"schedules": digests})},
        )
        return False
    if now + GONE - LOOK < until <= now + GONE:  # later: of a clock that ran ahead
        return None
    d.run(c, "UPDATE {schedule} SET next_at = :until, updated_at = :now WHERE name = :name", params)
    return until > now


def others(c: Connection, d: Dialect, declared: Mapping[str, tuple[str, Spec]] | None = None) -> dict[str, set[str]]:
    """What other programs declare whose workers run: the digests by the names of schedules."""
    own = "" if declared is None else _name(_digests(declared))
    rows = d.run(
        c,
        f"SELECT spec FROM {{schedule}} WHERE kind IS NULL AND name LIKE '{PREFIX}%' AND name <> :name"
        " AND next_at > :now",
        {"name": own, "now": d.now(c)},
        spec=JSON,
    )
    result: dict[str, set[str]] = {}
    for doc in rows.scalars():
        for name, digest in doc["schedules"].items():
            result.setdefault(name, set()).add(digest)
    return result


def _digests(declared: Mapping[str, tuple[str, Spec]]) -> dict[str, str]:
    return {name: schedule.digest(kind, spec.to_json()) for name, (kind, spec) in sorted(declared.items())}


def _name(digests: Mapping[str, str]) -> str:
    return PREFIX + blake2b(json.dumps(digests).encode(), digest_size=16).hexdigest()
