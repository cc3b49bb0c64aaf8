"""Tests in several processes, forked once everything is collected: ``pytest --forks=N``, or ``auto``.

Workers that start anew (pytest-xdist's) import and collect everything each for itself: ten seconds of CPU for each. A
forked one begins with what its parent has. A file's tests run in one process, in their order. A process asks for a file
whenever it has none left. A process that dies fails the test it ran, and another one does the rest of its file.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import defaultdict, deque
from multiprocessing import connection
from types import SimpleNamespace

import pytest

LOOK = 1.0  # seconds between two looks at processes that say nothing
PATIENCE = 60.0  # seconds for what processes put away at their end


def pytest_addoption(parser):
    parser.addoption("--forks", default="0", help="run the tests in so many forked processes; auto: see tests/forks.py")


def forks(config):
    """How many processes to run tests in; 0: in this one, as where there is no fork (Windows)."""
    option = config.getoption("forks")
    if option != "auto" and not option.isdecimal():
        raise pytest.UsageError(f"--forks={option}: give a number, or auto")
    if not hasattr(os, "fork"):
        return 0
    return default_count() if option == "auto" else int(option)


def default_count():
    """Three for a core of a small machine: half of a run waits, for leases, timeouts and processes of its own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores, min(3 * cores, 8))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    config = session.config
    if not (count := forks(config)) or config.option.collectonly:
        return None
    if session.testsfailed and not config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors while tests were collected")
    files = defaultdict(list)
    for number, item in enumerate(session.items):
        files[item.path].append(number)
    config._tmp_path_factory.getbasetemp()  # once: each process would empty it
    _Parent(session, deque(files.values())).run(count)
    return True


class _Worker:
    """One forked process, as its parent sees it."""

    def __init__(self, number, process, pipe):
        self.number, self.process, self.pipe = number, process, pipe
        self.pending = deque()  # numbers of the tests of its file that have not ended
        self.has_run = False
        name = f"fork{number}"  # and two attributes as reporters know them of pytest-xdist's workers
        self.gateway = SimpleNamespace(id=name)
        self.workerinfo = {
            "id": name, "sysplatform": sys.platform, "version_info": sys.version_info, "executable": sys.executable,
        }  # fmt: skip


class _Parent:
    """Hands out files, and passes on what the processes report."""

    def __init__(self, session, files):
        self.session, self.hook, self.files = session, session.config.hook, files
        self.numbers, self.workers = itertools.count(), {}

    def run(self, count):
        session = self.session
        try:
            for _ in range(min(count, len(self.files))):
                self._fork()
            while self.workers:
                ready = connection.wait(list(self.workers), timeout=LOOK)
                for worker in list(self.workers.values()):
                    if worker.pipe in ready:
                        self._receive(worker)
                    elif not (worker.process.is_alive() or worker.pipe.poll()):  # what a test began has its pipe open
                        self._reap(worker)
        finally:
            self._shut_down()
        if self.files and not (session.shouldfail or session.shouldstop):
            raise session.Failed(f"the tests of {len(self.files)} files were not run: their processes ended")
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _fork(self):
        number = next(self.numbers)
        mine, its = multiprocessing.Pipe()
        others = [*self.workers, mine]
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(self.session, number, its, others), name=f"fork{number}"
        )
        process.start()
        its.close()
        self.workers[mine] = _Worker(number, process, mine)

    def _receive(self, worker):
        try:
            what, *content = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._reap(worker)
            return
        getattr(self, f"_on_{what}")(worker, *content)

    def _on_idle(self, worker):
        is_over = self.session.shouldfail or self.session.shouldstop or not self.files
        worker.pending = deque(() if is_over else self.files.popleft())
        with contextlib.suppress(BrokenPipeError):
            worker.pipe.send(list(worker.pending))

    def _on_start(self, worker, number):
        worker.has_run = True
        item = self.session.items[number]
        self.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)

    def _on_report(self, worker, data):
        report = self.hook.pytest_report_from_serializable(config=self.session.config, data=data)
        self._log(worker, report)

    def _on_end(self, worker, number):
        item = self.session.items[number]
        worker.pending.popleft()
        self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _on_over(self, worker):
        """The process runs no more tests: there are none, or a failure ended the run."""
        worker.pending.clear()

    def _on_warning(self, _, warning):
        self.hook.pytest_warning_recorded.call_historic(kwargs=warning)

    def _on_failure(self, worker, text):
        """Something failed that belongs to no test: fixtures of a process's whole run at its end, mostly."""
        self._log(worker, _failure(f"{worker.gateway.id}", ("tests", None, worker.gateway.id), text))

    def _log(self, worker, report):
        report.node = worker
        self.hook.pytest_runtest_logreport(report=report)

    def _reap(self, worker):
        """It has ended: with its work, or in the middle of a test."""
        del self.workers[worker.pipe]
        worker.pipe.close()
        _join(worker.process, PATIENCE)
        code = worker.process.exitcode
        if not worker.pending:
            if code:
                self._on_failure(worker, f"the process ended with {code}, not in the middle of a test")
        else:
            item = self.session.items[worker.pending.popleft()]
            text = f"the process that ran this test ended with {code} in the middle of it"
            self._log(worker, _failure(item.nodeid, item.location, text))
            self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            if worker.pending:
                self.files.appendleft(list(worker.pending))
        if self.files and worker.has_run and not (self.session.shouldfail or self.session.shouldstop):
            self._fork()

    def _shut_down(self):
        """Whatever happened here: processes put away what they have started (servers)."""
        until = time.monotonic() + PATIENCE
        for pipe in self.workers:
            pipe.close()
        for worker in self.workers.values():
            _join(worker.process, until - time.monotonic())


def _join(process, seconds):
    process.join(max(0.0, seconds))
    if process.is_alive():
        process.kill()
        process.join()


def _failure(nodeid, location, text):
    return pytest.TestReport(nodeid, location, {}, "failed", text, "call")


# -- in a forked process -----------------------------------------------------------------------------------------


def _work(session, number, pipe, others):
    """Run files until there are none, then end this process's own fixtures and servers."""
    atexit._clear()  # what the parent does at its end
    for other in others:
        other.close()
    config = session.config
    _begin_anew(config, number)
    config.pluginmanager.register(_Reporter(config, pipe), "forks-reporter")
    status = 0
    try:
        with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
            _run(session, pipe)
            pipe.send(("over",))
    except BaseException:  # noqa: BLE001 - said by the parent, of no test
        status = _report_failure(pipe)
    try:
        session._setupstate.teardown_exact(None)
    except BaseException:  # noqa: BLE001 - `pytest.fail` is no Exception
        status = _report_failure(pipe)
    try:
        pipe.close()
        atexit._run_exitfuncs()
    finally:
        os._exit(status)


def _report_failure(pipe):
    with contextlib.suppress(BrokenPipeError):
        pipe.send(("failure", traceback.format_exc()))
    return 1


def _begin_anew(config, number):
    """What processes must not share: where output is caught, and the folder of temporary files."""
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / f"fork{number}"
    factory._basetemp.mkdir()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(session, pipe):
    while True:
        pipe.send(("idle",))
        if not (numbers := pipe.recv()):
            return
        for number in numbers:
            item = session.items[number]
            pipe.send(("start", number))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=_next(session, number, numbers))
            pipe.send(("end", number))
            if session.shouldfail or session.shouldstop:
                return


def _next(session, number, numbers):
    """The node whose fixtures stay after a test: the next test of the file, or the session after its last."""
    return session.items[number + 1] if number != numbers[-1] else session


class _Reporter:
    """Tells the parent what the reporters of a single process would hear."""

    def __init__(self, config, pipe):
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report):
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        warning_message.source = None  # an open file, say
        try:
            pickle.loads(pickle.dumps(warning_message))  # noqa: S301 - our own
        except Exception:  # noqa: BLE001 - a warning of a class that cannot travel
            text = f"{warning_message.category.__name__}: {warning_message.message}"
            warning_message = warnings.WarningMessage(
                UserWarning(text), UserWarning, warning_message.filename, warning_message.lineno
            )
        content = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("warning", content))
