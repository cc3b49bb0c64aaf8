"""What the chaos tests share: processes that end with the test, work to do, and an eye on the turns."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from uuid import uuid4

import history

from resilient.store.db.database import Database
from resilient.store.gates import turns
from resilient.store.jobs import insert as jobs
from tests import nursery
from tests.helpers import LIMIT

HERE = Path(__file__).parent
NO_TURN = ("out of the line", "stood still", "that were over")  # housekeeping's errors about what is stranded


def address(database):
    return database.url.render_as_string(hide_password=False)


class Crew:
    """The worker processes of one test, each with its log of what it said."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        self.started = []

    def start(self, target, *options):
        """``target``: a database or its address."""
        url = target if isinstance(target, str) else address(target)
        name = f"worker-{len(self.started)}"
        with (self.folder / f"{name}.said").open("wb") as said:
            child = nursery.start(HERE / "child.py", url, self.log, *options, stderr=said)
        child.name = name
        self.started.append(child)
        return child

    def alive(self):
        return [child for child in self.started if child.poll() is None]

    def finish(self, target, *options, timeout=120):
        """Let a healthy worker end what is left."""
        child = self.start(target, "--until-idle", *options)
        assert child.wait(timeout) == 0, self.said(child)

    def stop(self, *children, timeout=60):
        """A graceful stop of these, or of all."""
        children = children or self.alive()
        for child in children:
            child.terminate()
        for child in children:
            assert child.wait(timeout) == 0, self.said(child)

    def said(self, child=None):
        names = [child.name] if child else [one.name for one in self.started]
        return "\n".join((self.folder / f"{name}.said").read_text() for name in names)

    def stranded(self):
        """J9 as the workers themselves see it."""
        return [f"J9 {line}" for line in self.said().splitlines() if any(words in line for words in NO_TURN)]

    def runs(self, event="start"):
        return [line for line in history.read(self.log) if line["event"] == event]

    def close(self):
        for child in self.alive():
            child.send_signal(signal.SIGCONT)
            child.kill()
        for child in self.started:
            child.wait()


class Provider:
    """The provider's process."""

    def __init__(self, folder):
        self.log = folder / "arrivals"
        self.process = nursery.start(HERE / "provider.py", self.log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def down(self, seconds, account="*"):
        self._control({"down": account, "seconds": seconds})

    def throttle(self, account, answers):
        self._control({"throttle": account, "answers": answers})

    def connect(self, account):
        """A person grants access: the first pair of tokens."""
        return self._control({"connect": account})

    def _control(self, word):
        body = json.dumps(word).encode()
        with urllib.request.urlopen(f"{self.url}/control", body, timeout=10) as answer:  # noqa: S310 - our own
            return json.loads(answer.read())

    def arrivals(self):
        return history.read(self.log)

    def exchanges(self):
        """What its token endpoint was asked."""
        return history.read(f"{self.log}-tokens")

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(LIMIT)


class Eye:
    """Looks at the turns all the time (J9 holds at every committed moment, not only in the end)."""

    def __init__(self, database, every=0.1):
        self.database, self.every = Database(database.url, connections=1), every
        self.seen, self.looks = [], 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self):
        while not self._closed.wait(self.every):
            with contextlib.suppress(Exception):  # the database may be away, or this session cut
                found = self.database.transaction_sync(turns.stranded)
                self.looks += 1
                self.seen += [f"J9 {key}: ready work and no turn" for key, _ in found]

    def close(self):
        """What it saw."""
        self._closed.set()
        self._thread.join(LIMIT)
        self.database.close_sync()
        return self.seen


def new(kind="work", key="p/0", payload=None, **over):
    return jobs.NewJob(uuid4(), kind, key, json.dumps(payload or {}), **{"max_attempts": 20, **over})


def put(database, *batch):
    """Insert jobs; their ids as the logs name them."""
    database.transaction_sync(jobs.insert, batch)
    return [job.id.hex for job in batch]


def states(database, ids=None):
    found = history.rows(database, "SELECT * FROM resilient_job")
    found = {str(row.id).replace("-", ""): row for row in found}
    return found if ids is None else [found[id_] for id_ in ids]


def unfinished(database):
    return history.rows(database, "SELECT count(*) FROM resilient_job WHERE finished_at IS NULL")[0][0]


def wait(condition, timeout=60, about="waited in vain"):
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, about() if callable(about) else about
        time.sleep(0.02)
    return found
