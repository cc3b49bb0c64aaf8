"""Cuts a program off from its database at one commit, counted: as SIGKILL would, or as a broken line does.

A `Knife` counts the commits (of transactions that wrote something) that go through it, and strikes at one of them:

    die before, die after     from then on nothing of this program reaches the database, no rollback either
    cut before, cut after     the line breaks, or the answer is lost; the program lives and may connect again
    cut begin                 the line breaks at a transaction's first statement

On PostgreSQL a proxy reads the protocol along (`KnifeProxy`); what was open is rolled back by the server, because its
session ended. On SQLite the driver's connections are the knife's (`knives_in_sqlite`); what was open is rolled back as
the journal would be.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import sqlite3.dbapi2 as dbapi
import struct
import threading

from proxy import Listener

DEATHS = ("die before", "die after")
CUTS = ("cut before", "cut after", "cut begin")
_WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE|COPY)\b", re.IGNORECASE)
_READS = re.compile(r"FOR (NO KEY )?UPDATE|SKIP LOCKED", re.IGNORECASE)
_ABOUT = re.compile(r"(?:INTO|UPDATE|DELETE FROM|COPY)\s+\"?(\w+)", re.IGNORECASE)


def writes(statement):
    return _WRITES.search(_READS.sub("", statement)) is not None


class Knife:
    """Strikes at the ``number``-th commit, counted from 1; 0: never."""

    def __init__(self, number=0, mode="die before"):
        self.number, self.mode = number, mode
        self.commits, self.begins = [], 0  # what each was about
        self.is_dead = self.has_struck = self.is_put_away = False
        self.on_death = lambda: None
        self._lock = threading.Lock()

    def at_begin(self):
        """Whether the line breaks here."""
        with self._lock:
            self.begins += 1
            return self._strikes(self.begins) if self.mode == "cut begin" else False

    def at_commit(self, statements):
        """What happens to this commit: a mode, or None."""
        with self._lock:
            about = (table for one in statements if writes(one) for table in _ABOUT.findall(_READS.sub("", one)))
            self.commits.append(" ".join(dict.fromkeys(about)))
            return self.mode if self.mode != "cut begin" and self._strikes(len(self.commits)) else None

    def _strikes(self, count):
        if self.has_struck or self.is_put_away or count != self.number:
            return False
        self.has_struck = True
        return True

    def die(self):
        self.is_dead = True
        self.on_death()


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


class KnifeProxy(Listener):
    """Passes everything through the knife of the moment."""

    def __init__(self, socket_path):
        super().__init__(socket_path)
        self.knife, self.lines = Knife(), set()

    async def _serve(self, reader, writer):
        if self.knife.is_dead:
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_unix_connection(self.path)
        line = _Line(self, reader, writer, server_reader, server_writer)
        self.lines.add(line)
        try:
            with contextlib.suppress(asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
                await asyncio.gather(line.up(), line.down())
        finally:
            self.lines.discard(line)
            line.abort()

    def die(self):
        """On the proxy's loop: every line ends."""
        self.knife.die()
        for line in list(self.lines):
            line.abort()


class _Line:
    """One connection: messages of the client's are held until their round (Sync, or a simple query) is whole."""

    def __init__(self, proxy, reader, writer, server_reader, server_writer):
        self.proxy, self.knife = proxy, proxy.knife
        self.reader, self.writer, self.server_reader, self.server_writer = reader, writer, server_reader, server_writer
        self.is_open = False  # a transaction, as the server said last
        self.names, self.statements = {}, []  # prepared statements; those of the transaction
        self.losing = None

    async def up(self):
        size = await self.reader.readexactly(4)
        self.server_writer.write(size + await self.reader.readexactly(struct.unpack("!I", size)[0] - 4))
        messages, texts = [], []
        while True:
            head = await self.reader.readexactly(5)
            body = await self.reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)
            messages.append(head + body)
            self._read(head[:1], body, texts)
            if head[:1] in b"SQpXdcfH":
                if head[:1] in b"SQ" and texts:
                    if self._is_cut(texts):
                        return
                    texts = []
                self.server_writer.write(b"".join(messages))
                await self.server_writer.drain()
                messages = []

    def _read(self, kind, body, texts):
        if kind == b"Q":
            texts.append(body[:-1].decode(errors="replace"))
        elif kind == b"P":
            name, text, _ = body.split(b"\0", 2)
            self.names[name] = text.decode(errors="replace")
        elif kind == b"B":
            texts.append(self.names.get(body.split(b"\0", 2)[1], ""))

    def _is_cut(self, texts):
        """Count what this round begins and commits; True if the line was cut here."""
        words = [text.strip().upper().split(" ")[0].rstrip(";") for text in texts]
        begins = not self.is_open
        self.statements = (texts if begins else self.statements + texts)[-50:]
        if begins and self.knife.at_begin():
            self.abort()
            return True
        commits = "COMMIT" in words or (not self.is_open and "BEGIN" not in words)
        if not commits or not any(map(writes, self.statements)):
            return False
        mode = self.knife.at_commit(self.statements)
        if mode is None:
            return False
        if mode.endswith("after"):
            self.losing = mode
            return False
        if mode == "die before":
            self.proxy.die()
        self.abort()
        return True

    async def down(self):
        while True:
            head = await self.server_reader.readexactly(5)
            body = await self.server_reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)
            if head[:1] == b"Z":
                self.is_open = body != b"I"
                if self.losing:
                    if self.losing == "die after":
                        self.proxy.die()
                    self.abort()
                    return
            if not self.losing:
                self.writer.write(head + body)
                await self.writer.drain()

    def abort(self):
        for end in (self.writer, self.server_writer):
            end.transport.abort()


# -- SQLite ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def knives_in_sqlite(knife):
    """Connections that are opened from now on are this knife's."""
    real = sqlite3.connect

    def connect(*args, **kwargs):
        if knife.is_dead:
            raise sqlite3.OperationalError("unable to open database file")
        kwargs["factory"] = _Connection
        connection = real(*args, **kwargs)
        connection.knife = knife
        return connection

    sqlite3.connect = dbapi.connect = connect
    try:
        yield
    finally:
        sqlite3.connect = dbapi.connect = real


class _Cursor(sqlite3.Cursor):
    def execute(self, statement, *args):
        return self.connection.through(statement, lambda: super(_Cursor, self).execute(statement, *args))

    def executemany(self, statement, *args):
        return self.connection.through(statement, lambda: super(_Cursor, self).executemany(statement, *args))


class _Connection(sqlite3.Connection):
    knife = None
    statements = ()

    def cursor(self, factory=_Cursor):
        return super().cursor(factory)

    def execute(self, statement, *args):
        return self.cursor().execute(statement, *args)

    def commit(self):
        if self.in_transaction:
            return self.through("COMMIT", super().commit)
        return None

    def rollback(self):
        if not self.knife.is_dead:
            super().rollback()

    def through(self, statement, run):
        knife, word = self.knife, statement.lstrip().upper().split(" ")[0]
        if knife is None:
            return run()
        if knife.is_dead:
            raise sqlite3.OperationalError("disk I/O error")
        if word == "BEGIN":
            self.statements = []
            if knife.at_begin():
                raise sqlite3.OperationalError("disk I/O error")
        elif self.in_transaction:
            self.statements = [*self.statements, statement][-50:]
        if word != "COMMIT" or not any(map(writes, self.statements)):
            return run()
        return self._commit(knife, run)

    def _commit(self, knife, run):
        mode = knife.at_commit(self.statements)
        if mode is None:
            return run()
        if mode.endswith("before"):
            super().rollback()
        else:
            run()
        if mode.startswith("die"):
            knife.die()
        raise sqlite3.OperationalError("disk I/O error")
