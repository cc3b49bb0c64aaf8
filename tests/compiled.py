"""What SQLAlchemy has compiled once is kept for all engines of a test process.

An engine keeps it for itself, and each test makes a few: of what tests on a database compute, a tenth was the same
statements compiled again. What two engines may share is decided by all that a statement's text depends on; where the
columns of a result depend on the database (``SELECT *``), each keeps its own.
"""

from __future__ import annotations

from sqlalchemy.engine import base
from sqlalchemy.util import LRUCache

MOST = 5000
_ALL = LRUCache(MOST)


class Compiled:
    """The cache of one engine, with SQLAlchemy's keys: a dialect, then what the statement is."""

    def __init__(self, own):
        self._own = own

    def get(self, key, default=None):
        hit = _ALL.get((_kind(key[0]), *key[1:]))
        return self._own.get(key, default) if hit is None else hit

    def __setitem__(self, key, compiled):
        if "*" in compiled.string.replace("(*)", ""):
            self._own[key] = compiled
        else:
            _ALL[_kind(key[0]), *key[1:]] = compiled

    def __len__(self):
        return len(self._own)

    def clear(self):
        self._own.clear()


def _kind(dialect):
    """All of a dialect that a compiled statement depends on."""
    names = ("server_version_info", "paramstyle", "max_identifier_length", "label_length", "_json_serializer")
    return type(dialect), *(getattr(dialect, name, None) for name in names)


class _Slot:
    """The attribute of every engine that holds its cache."""

    def __get__(self, engine, owner=None):
        return self if engine is None else vars(engine)["cache"]

    def __set__(self, engine, cache):
        vars(engine)["cache"] = Compiled(cache) if isinstance(cache, LRUCache) else cache


def share():
    """Let engines that are made from now on share."""
    base.Engine._compiled_cache = _Slot()
