"""Processes of a test's own that are at work at once: forked from one that has imported the engine.

Importing it takes a second of CPU, and a run of all tests starts some two hundred processes that work, are killed,
stopped and replaced. What such a process does, it does as if it had been started by ``python script arguments``; a
`Child` is used like a `subprocess.Popen`. Elsewhere than on Linux it is one.

Run as a program, this file is the process that they are forked from. It knows no test: with each order it gets
a socket, three files and nothing else; the child reads from the socket what it is to be, the test its pid and end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from functools import cache
from pathlib import Path
from subprocess import PIPE

WARM = (
    "psycopg", "sqlalchemy.dialects.postgresql.psycopg", "sqlalchemy.dialects.sqlite.pysqlite",
    "starlette.applications", "uvicorn", "uvicorn.protocols.http.auto", "resilient.wire.oauth.endpoints",
    "anyio._backends._asyncio", "anyio.streams.tls", "cryptography.hazmat.primitives.ciphers.aead",
    "resilient.surface.cli.root", "resilient.surface.cli.exits", "resilient.surface.probes", "rich.table", "runpy",
    "resilient.engine.run.worker", "resilient.engine.gates.gate", "resilient.wire.requests.transport", "aiosqlite",
    "alembic.command", "alembic.config", "fastapi",
)  # fmt: skip
DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # who ends a whole run ends the test process: that is enough


def start(script, *arguments, stdin=None, stdout=None, stderr=None, cwd=None, env=None):
    """A child that runs a file (a `Path`) or a source; its three files may each be PIPE, a file or its number."""
    arguments = [str(one) for one in arguments]
    files = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    if sys.platform == "linux":
        return Child(script, arguments, cwd=cwd, env=env, **files)
    command = [sys.executable, script] if isinstance(script, Path) else [sys.executable, "-c", script]
    return subprocess.Popen([*command, *arguments], cwd=cwd, env=env, **files, text=True)


def module(name, *arguments, **options):
    """A child that is ``python -m name arguments``."""
    run = "import os, runpy, sys; sys.path.insert(0, os.getcwd()); "
    run += f"runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return start(run, *arguments, **options)


# -- in the test ---------------------------------------------------------------------------------------------


@cache
def _nursery():
    """Started once for a test process, ended with it: it sees that nobody can give an order any more."""
    ours, theirs = _line()
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    @atexit.register
    def end():
        ours.close()
        process.wait(10)

    return ours, threading.Lock()


def _line():
    """Two ends; one message a `recv`."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Child:
    """As much of `subprocess.Popen` as the tests use."""

    def __init__(self, script, arguments, *, stdin, stdout, stderr, cwd, env):
        self.returncode, self.stdin, self.stdout, self.stderr = None, None, None, None
        self._lock = threading.Lock()
        self._line, theirs = _line()
        weakref.finalize(self, self._line.close)  # a test that failed waits for nobody
        with contextlib.ExitStack() as given:
            given.enter_context(theirs)
            files = [0, 1, 2]
            if stdin == PIPE:
                files[0], end = os.pipe()
                given.callback(os.close, files[0])
                self.stdin = os.fdopen(end, "w")
            elif stdin is not None:
                files[0] = _number(stdin)
            for number, (name, target) in enumerate((("stdout", stdout), ("stderr", stderr)), 1):
                if target == PIPE:
                    end, files[number] = os.pipe()
                    given.callback(os.close, files[number])
                    setattr(self, name, os.fdopen(end))
                elif target is not None:
                    files[number] = _number(target)
            control, lock = _nursery()
            with lock:
                socket.send_fds(control, [b"!"], [theirs.fileno(), *files])
        is_file = isinstance(script, Path)
        order = {
            "file": str(script) if is_file else "", "source": "" if is_file else script, "arguments": arguments,
            "environ": dict(os.environ if env is None else env), "folder": str(cwd or Path.cwd()),
        }  # fmt: skip
        self._line.send(json.dumps(order).encode())
        self.pid = int(self._line.recv(64))

    def wait(self, timeout=None):
        """Its exit status, a signal's number negative. Raises `subprocess.TimeoutExpired`."""
        with self._lock:
            if self.returncode is None:
                with selectors.DefaultSelector() as one:
                    one.register(self._line, selectors.EVENT_READ)
                    if not one.select(timeout):
                        raise subprocess.TimeoutExpired(f"child {self.pid}", timeout)
                with contextlib.suppress(ConnectionResetError):  # it was killed before it had read what it is to be
                    self.returncode = int(self._line.recv(64))
                if self.returncode is None:
                    self.returncode = int(self._line.recv(64))
                self._line.close()
        return self.returncode

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout=None):
        """What is left to read of both its outputs. What is longer than a pipe on the second is read to its end only
        when the first one has ended.
        """
        if self.stdin is not None:
            with contextlib.suppress(OSError):
                self.stdin.close()
        said = [None, None]
        for number, pipe in enumerate((self.stdout, self.stderr)):
            if pipe is not None and not pipe.closed:
                said[number] = pipe.read()
                pipe.close()
        self.wait(timeout)
        return tuple(said)


def _number(file):
    return file if isinstance(file, int) else file.fileno()


# -- the process they come from ------------------------------------------------------------------------------


def serve(control):
    """Fork for every order; in a child: its socket and files."""
    lines, woken, wake = {}, *os.pipe2(os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    usual = {one: signal.signal(one, signal.SIG_IGN) for one in DEAF}
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as either:
        either.register(control, selectors.EVENT_READ)
        either.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in either.select()}
            if woken in ready:
                os.read(woken, 4096)
                bury(lines)
            if control not in ready:
                continue
            order, files, *_ = socket.recv_fds(control, 1, 4)
            if not order:
                break
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one, action in usual.items():
                    signal.signal(one, action)
                for one in (control.detach(), woken, wake, *lines.values()):
                    os.close(one)
                return files
            lines[pid], *theirs = files
            os.write(lines[pid], b"%d" % pid)
            for one in theirs:
                os.close(one)
    for pid in lines:
        os.kill(pid, signal.SIGKILL)
    return None


def bury(lines):
    """Tell who has ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            line = lines.pop(found[0])
            with contextlib.suppress(OSError):  # the test has gone
                os.write(line, b"%d" % os.waitstatus_to_exitcode(found[1]))
            os.close(line)


def become(line, *files):
    """Do in this process what the order says."""
    with socket.socket(fileno=line) as connection:
        order = json.loads(connection.recv(2**20))
    for number, one in enumerate(files):
        os.dup2(one, number)
        os.close(one)
    os.environ.clear()
    os.environ.update(order["environ"])
    os.chdir(order["folder"])
    for stream in (sys.stdout, sys.stderr):  # as the interpreter opens them
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())
    file, source = order["file"] or "-c", order["source"]
    sys.argv = [file, *order["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if order["file"]:
        main.__file__, source = file, Path(file).read_text()
        sys.path.insert(0, str(Path(file).parent))
    try:
        exec(compile(source, file, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - the test's own program
    except Exception:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        sys.exit(1)


def warm():
    """Import what the children will need, and nothing that opens anything."""
    import resilient

    for name in resilient.__all__:
        getattr(resilient, name)
    for name in WARM:
        __import__(name)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # the engine of this checkout, wherever else there is one
    warm()
    found = serve(socket.socket(fileno=int(sys.argv[1])))
    if found:
        become(*found)
