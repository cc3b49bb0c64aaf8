"""Everything a reader of the database can see: every row, and the bytes of its files, the log of changes too."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import psycopg


def dump(url):
    """The rows of every table of the database, and its files (Latin-1: a byte is a character), each as one text."""
    rows, files = _sqlite(url) if url.startswith("sqlite") else _postgres(url)
    assert files
    return "\n".join(rows), "\n".join(map(_text, files))


def _sqlite(url):
    file = Path(url.removeprefix("sqlite:///"))
    with contextlib.closing(sqlite3.connect(file)) as c:
        rows = list(c.iterdump())
    return rows, sorted(file.parent.glob(file.name + "*"))


def _postgres(url):
    with psycopg.connect(url, autocommit=True) as c:
        c.execute("CHECKPOINT")
        tables = c.execute(
            "SELECT quote_ident(schemaname) || '.' || quote_ident(tablename) FROM pg_tables"
            " WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        ).fetchall()
        rows = [row for (table,) in tables for (row,) in c.execute(f"SELECT t::text FROM {table} t")]
        (own,) = c.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
        (data,) = c.execute("SHOW data_directory").fetchone()
    files = [*(Path(data) / "base" / str(own)).iterdir(), *(Path(data) / "pg_wal").iterdir()]
    return rows, sorted(path for path in files if path.is_file())


def _text(path):
    try:
        return path.read_bytes().decode("latin-1")
    except FileNotFoundError:  # a segment of the log that was recycled meanwhile
        return ""
