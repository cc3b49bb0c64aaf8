"""Run a benchmark of this folder, or `resilient bench`, on a database of its own.

    python -m tests.benchmarks.on_server postgresql bench_soak
    python -m tests.benchmarks.on_server postgresql bench all --rounds 1

What follows the script's name are its arguments behind the database's address. The PostgreSQL server is that of the
tests, with durable commits; a SQLite file stands in the temporary directory.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import PostgresServer

HERE = Path(__file__).parent


def main(database, script, *arguments):
    """The script's exit status."""
    server = None if database == "sqlite" else PostgresServer()
    url = f"sqlite:///{tempfile.gettempdir()}/soak.db" if server is None else server.url()
    try:
        if script == "bench":
            command = [sys.executable, "-m", "resilient.surface.cli", "bench", *arguments, "--database", url]
        else:
            command = [sys.executable, "-W", "ignore", str(HERE / f"{script}.py"), url, *arguments]
        return subprocess.run(command, check=False, cwd=HERE.parents[1]).returncode
    finally:
        if server is not None:
            server.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends, too
    sys.exit(main(*sys.argv[1:]))
