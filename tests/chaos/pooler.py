"""PgBouncer in transaction mode before a PostgreSQL server of a test, pointed to another one as an operator does."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests import brokers

SETTINGS = """
[databases]
* = host={host} port={port}

[pgbouncer]
pool_mode = transaction
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = trust
auth_file = {home}/users
default_pool_size = 15
max_client_conn = 200
server_login_retry = 1
server_connect_timeout = 5
"""


class Pooler(brokers.Server):
    """Without PgBouncer the test is skipped."""

    def __init__(self, server):
        if shutil.which("pgbouncer") is None:
            pytest.skip("no pgbouncer here: apt-get install pgbouncer")
        super().__init__()
        self.home.chmod(0o755)
        self._user = server._server.system_user  # who may read its socket; PgBouncer is never root
        (self.home / "users").write_text('"postgres" ""\n')
        self._write(server)
        self.start()

    def command(self):
        return ["pgbouncer", *(["-u", self._user] if self._user else []), str(self.home / "pgbouncer.ini")]

    def url(self, name):
        """Before 1.21 it keeps no prepared statements."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}?prepare_threshold=none"

    def point(self, server):
        """The promoted server takes the place of the one that is gone: its settings are changed and read again."""
        self._write(server)
        self.process.send_signal(signal.SIGHUP)

    def _write(self, server):
        port = int((server.data / "postmaster.pid").read_text().splitlines()[3])
        text = SETTINGS.format(host=server.data, port=port, own_port=self.port, home=self.home)
        (self.home / "pgbouncer.ini").write_text(text)

    def said(self):
        return Path(self.home, "said").read_text()
