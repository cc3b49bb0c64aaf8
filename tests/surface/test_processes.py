"""``worker --processes N`` and ``--reload``: real processes, killed, stopped and started anew."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from types import SimpleNamespace

import httpx
import psutil
import pytest

from resilient import InvalidInput, Job, JobState, Resilient, handler
from resilient.surface.cli import supervisor, worker
from resilient.surface.cli.supervisor import Place, Report, Supervisor, endpoints
from tests.helpers import until

PROGRAM = """
import asyncio, os
from pathlib import Path
from resilient import Resilient, handler

@handler("short")
async def short(job):
    await asyncio.sleep(0.05)
    return os.getpid()

@handler("gated")
async def gated(job):
    Path(f"began.{{job.id}}").touch()
    while not Path("gate").exists():
        await asyncio.sleep(0.02)
    return os.getpid()

app = Resilient({url!r}, handlers=[short, gated])
"""


@handler("short")
async def short(job: Job[None]) -> None: ...


@handler("gated")
async def gated(job: Job[None]) -> None: ...


@pytest.fixture
async def app(database, database_url, tmp_path):
    (tmp_path / "fleet.py").write_text(PROGRAM.format(url=database_url))
    app = Resilient(database, handlers=[short, gated])
    yield app
    await app.close()


class Fleet:
    """A supervisor with its processes."""

    def __init__(self, process, log):
        self.process, self._log = process, log
        self.root = psutil.Process(process.pid)

    @property
    def log(self):
        return self._log.read_text()

    def pids(self):
        """Of its processes, by place."""
        latest = {}
        for number, pid in re.findall(r"process (\d+) is pid (\d+)", self.log):
            latest[int(number)] = int(pid)
        return latest

    def begun(self):
        """How many gated jobs have come to their handler: a job that is claimed is not there yet."""
        return len(list(self._log.parent.glob("began.*")))

    def signal(self, number):
        self.process.send_signal(number)

    async def ended(self):
        async with asyncio.timeout(60):
            return await self.process.wait()

    def address(self, paths):
        match = re.search(rf"{paths} at http://127\.0\.0\.1:(\d+)", self.log)
        return match and f"http://127.0.0.1:{match[1]}"


@pytest.fixture
async def start(tmp_path):
    """Start a supervisor; none of its processes outlives the test."""
    started, log = [], tmp_path / "log"

    async def start(*options, app="fleet:app", processes=2):
        command = [sys.executable, "-m", "resilient.surface.cli", "--app", app, "worker"]
        command += ["--processes", str(processes)] if processes else []
        with log.open("a") as file:
            process = await asyncio.create_subprocess_exec(
                *command, *options, cwd=tmp_path, stderr=file, start_new_session=True
            )
        started.append(process)
        return Fleet(process, log)

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


one_database = pytest.mark.parametrize("backend", ["postgresql"])  # what differs there is tested elsewhere


def put(app, kind, number):
    """For different accounts: of one alone a worker runs only as many at once as leave room for others."""
    keys = [f"crm/{n % 10}" for n in range(number)]
    return asyncio.gather(*(app.enqueue(kind, resource_key=key) for key in keys))


async def states(app):
    jobs = await app.jobs.list(limit=1000)
    return [job.state for job in jobs]


async def test_one_that_is_killed_under_load_is_replaced_and_nothing_is_lost(app, start, tmp_path):
    fleet = await start("--concurrency", "3", "--health", "0", "--lease", "2", processes=3)
    url = await until(lambda: fleet.address("/livez, /readyz"))
    async with httpx.AsyncClient(base_url=url) as client:
        await until(lambda: answers(client, "/readyz", 200, "ok\n"))
    await put(app, gated, 9)
    await until(lambda: fleet.begun() == 9)
    await put(app, short, 200)
    victim = fleet.pids()[1]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: fleet.pids()[1] != victim)
    assert "process 1 ended by SIGKILL; the next is started in" in fleet.log
    (tmp_path / "gate").touch()
    await until(lambda: is_all(app, 209, "succeeded"))
    fleet.signal(signal.SIGTERM)
    assert await fleet.ended() == 0
    jobs = await app.jobs.list(limit=1000)
    assert len({job.attempts for job in jobs}) == 1, "what a killed process ran is charged to nobody"
    assert sum(job.rescues for job in jobs) >= 3, "it was killed in the middle"


async def is_all(app, number, state):
    return await app.jobs.count(state=state) == number


async def test_a_signal_lets_all_of_them_finish(app, start, tmp_path):
    fleet = await start("--concurrency", "2", "--health", "127.0.0.1:0")
    await put(app, gated, 4)
    await until(lambda: fleet.begun() == 4)
    fleet.signal(signal.SIGTERM)
    url = await until(lambda: fleet.address("/livez, /readyz"))
    async with httpx.AsyncClient(base_url=url) as client:
        await until(lambda: answers(client, "/readyz", 503, "worker is draining\n"))
    assert await is_all(app, 4, "running")
    (tmp_path / "gate").touch()
    assert await fleet.ended() == 0
    jobs = await app.jobs.list()
    assert [(job.state, job.executions) for job in jobs] == [(JobState.SUCCEEDED, 1)] * 4
    assert len({job.result for job in jobs}) == 2, "both processes had their part"


async def answers(client, path, status, text):
    answer = await client.get(path)
    return (answer.status_code, answer.text) == (status, text)


async def test_a_signal_to_the_whole_group_is_one_and_a_second_hands_back(app, start):
    """As a terminal sends Ctrl-C: to the supervisor and to each process."""
    fleet = await start("--concurrency", "2")
    await put(app, gated, 4)
    await until(lambda: fleet.begun() == 4)
    os.killpg(fleet.process.pid, signal.SIGINT)
    await until(lambda: fleet.log.count("is stopping: 2 jobs still run") == 2)
    assert await is_all(app, 4, "running")
    while await is_all(app, 4, "running"):  # what comes within a second is the same
        fleet.signal(signal.SIGINT)
        await asyncio.sleep(0.1)
    assert await fleet.ended() == 0
    jobs = await app.jobs.list()
    assert [(job.state, job.attempts) for job in jobs] == [(JobState.READY, 0)] * 4


@one_database
async def test_processes_whose_supervisor_is_killed_drain_and_end(app, start, tmp_path):
    fleet = await start()
    await put(app, gated, 2)
    await until(lambda: fleet.begun() == 2)
    orphans = [psutil.Process(pid) for pid in fleet.pids().values()]
    fleet.signal(signal.SIGKILL)
    await fleet.ended()
    (tmp_path / "gate").touch()
    await asyncio.to_thread(psutil.wait_procs, orphans, 60)
    assert not any(one.is_running() for one in orphans)
    assert await states(app) == [JobState.SUCCEEDED] * 2


@one_database
async def test_one_that_had_its_jobs_is_followed_by_the_next(app, start):
    fleet = await start("--max-jobs", "5", "--concurrency", "1", processes=1)
    await put(app, short, 12)
    await until(lambda: is_all(app, 12, "succeeded"))
    await until(lambda: len(set(re.findall(r"is pid (\d+)", fleet.log))) > 1)
    assert "ended with" not in fleet.log, "that is no failure"
    fleet.signal(signal.SIGTERM)
    assert await fleet.ended() == 0


async def test_what_cannot_be_meant_ends_them_all(start, tmp_path):
    fleet = await start(app="nowhere:app", processes=2)
    assert await fleet.ended() == 2
    assert "there is no module 'nowhere' here" in fleet.log
    assert fleet.log.count("is pid") == 2, "none is started twice"


@one_database
async def test_health_speaks_for_all_and_metrics_for_each(app, start):
    fleet = await start("--health", "0", "--metrics", str(two_ports()))
    url = await until(lambda: fleet.address("/livez, /readyz"))
    async with httpx.AsyncClient() as client:
        await until(lambda: answers(client, f"{url}/readyz", 200, "ok\n"))
        ports = sorted(int(port) for port in re.findall(r"/metrics at http://127.0.0.1:(\d+)", fleet.log))
        assert ports[1] == ports[0] + 1
        for port in ports:
            assert "resilient_worker_slots 50.0" in (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        os.kill(fleet.pids()[0], signal.SIGKILL)
        await until(lambda: answers(client, f"{url}/readyz", 503, "process 0 is not running\n"))
        assert await answers(client, f"{url}/livez", 200, "ok\n"), "a restart of them all would not help"
        await until(lambda: answers(client, f"{url}/readyz", 200, "ok\n"))


def two_ports():
    """The first of two free ports."""
    while True:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError, OverflowError):
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            return first.getsockname()[1]


@one_database
async def test_a_changed_program_is_loaded_after_a_drain(app, start, tmp_path):
    fleet = await start("--reload", "--concurrency", "2", processes=None)
    await put(app, gated, 1)
    await until(lambda: fleet.begun() == 1)
    first = fleet.pids()[0]
    program = tmp_path / "fleet.py"
    program.write_text(program.read_text().replace("return os.getpid()", "return 'new'"))
    await until(lambda: "changed: fleet.py; the processes drain and start anew" in fleet.log)
    assert await is_all(app, 1, "running"), "it waits for what runs"
    (tmp_path / "gate").touch()
    await until(lambda: fleet.pids()[0] != first)
    await put(app, short, 1)
    await until(lambda: is_all(app, 2, "succeeded"))
    assert [job.result for job in await app.jobs.list(kind="short")] == ["new"]
    assert [job.result for job in await app.jobs.list(kind="gated")] == [first]
    fleet.signal(signal.SIGTERM)
    assert await fleet.ended() == 0


@one_database
async def test_a_program_that_does_not_load_waits_for_its_correction(app, start, tmp_path):
    program = tmp_path / "fleet.py"
    source = program.read_text()
    program.write_text("this is no Python")
    fleet = await start("--reload", processes=None)
    await until(lambda: "it is started when a file changes" in fleet.log)
    program.write_text(source)
    await put(app, short, 1)
    await until(lambda: is_all(app, 1, "succeeded"))
    fleet.signal(signal.SIGTERM)
    assert await fleet.ended() == 0


# -- without processes -----------------------------------------------------------------------------------------------


def test_what_the_aggregate_says():
    keeper = Supervisor(lambda *_: [], 5)
    assert keeper.livez().status == 200
    well, blocked, mute, new, hanging = keeper.places
    now = time.monotonic()
    for place in keeper.places:
        place.process = object()
    new._began, hanging._began = now - 50, now - 70
    well.report = Report("", "", now)
    blocked.report = Report("loop has stood still for 70 s", "", now)
    mute.report = Report("", "database does not answer\nschema is not checked yet", now - 100)
    assert keeper.livez().text.decode().splitlines() == [
        "process 1 loop has stood still for 70 s",
        "process 2 has said nothing for 100 s",
        "process 4 has said nothing for 70 s",
    ]
    assert keeper.readyz().text.decode().splitlines() == [
        "process 2 database does not answer; schema is not checked yet",
        "process 3 is starting",
        "process 4 is starting",
    ]


async def test_one_signal_is_enough_for_a_process_that_hangs_at_its_start(monkeypatch, caplog):
    """It has claimed nothing: nobody waits for it, as for handlers that run."""
    monkeypatch.setattr(supervisor, "PATIENCE", 0.05)
    command = [sys.executable, "-S", "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]
    keeper = Supervisor(lambda *_: command, 2)
    task = asyncio.create_task(keeper.run())
    await until(lambda: all(place.process is not None for place in keeper.places))
    keeper._signalled()
    assert await asyncio.wait_for(task, 60) == 0
    assert caplog.text.count("since its start: it is killed") == 2


async def test_signals_within_a_second_are_one(monkeypatch):
    """Ctrl-C in a terminal comes to the whole group, and from a wrapper (`uv run`) once more."""
    times, words = [], []
    keeper = Supervisor(lambda *_: [], 1, monotonic=lambda: times[-1])
    monkeypatch.setattr(Place, "tell", lambda _, word: words.append(word))
    monkeypatch.setattr(Place, "kill", lambda _: words.append("kill"))
    for now, word in ((5.0, supervisor.STOP), (20.0, supervisor.NOW), (21.5, "kill")):
        times.append(now)
        keeper._signalled()
        assert words.pop() == word
        times.append(now + 0.9)
        keeper._signalled()
        assert words == []


async def test_a_process_that_has_reported_is_waited_for(monkeypatch):
    """Its handlers may take long."""
    monkeypatch.setattr(supervisor, "PATIENCE", 0.0)
    place = Place(0)
    code = "import socket, sys; one = socket.socket(fileno=int(sys.argv[1])); one.sendall(b'[0, 0]\\n'); "
    code += "\nwhile one.recv(1) != b'w': pass\nsys.exit(7)"
    done = asyncio.create_task(place.run(lambda _, fd: [sys.executable, "-S", "-c", code, str(fd)]))
    await until(lambda: place.report is not None)
    place.tell(supervisor.STOP)
    await asyncio.sleep(0)
    place._end_unheard(1)
    place.tell(supervisor.NOW)
    assert await done == 7


@pytest.mark.parametrize(
    ("metrics", "each"),
    [
        (None, [[], []]),
        ("9100", [["--metrics", "9100"], ["--metrics", "9101"]]),
        (":9100", [["--metrics", ":9100"], ["--metrics", ":9101"]]),
        ("[::1]:9100", [["--metrics", "[::1]:9100"], ["--metrics", "[::1]:9101"]]),
        ("0", [["--metrics", "0"], ["--metrics", "0"]]),
    ],
)
def test_each_has_a_port_of_its_own(metrics, each):
    assert endpoints(2, metrics, "8081") == each


def test_ports_that_meet_are_refused():
    with pytest.raises(InvalidInput, match="--health :9101: the metrics of 2 processes take the ports 9100 to 9101"):
        endpoints(2, "9100", ":9101")
    with pytest.raises(InvalidInput, match="4 processes need ports up to 65537; say a lower one"):
        endpoints(4, ":65534", None)


async def test_a_process_that_a_signal_without_a_name_ends_is_followed_by_the_next(caplog):
    """A real-time signal is none of `signal.Signals`; the others at work are not to end for it."""
    command = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 1})"]
    keeper = Supervisor(lambda *_: command, 1)
    task = asyncio.create_task(keeper.run())
    await until(lambda: "the next is started in" in caplog.text)
    assert f"ended by signal {signal.SIGRTMIN + 1}; the next" in caplog.text
    keeper._stop()
    assert await task == 0


async def test_files_that_cannot_be_watched_end_all_with_the_reason(monkeypatch, caplog):
    """As at the system's limit of inotify; a worker that is never started anew would only seem to be watched."""
    import watchfiles

    def refuses(*_, **__):
        raise OSError("inotify watch limit reached")

    monkeypatch.setattr(watchfiles, "awatch", refuses)
    read = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(9)"
    keeper = Supervisor(lambda _, fd: [sys.executable, "-c", read, str(fd)], 1, reload=True)
    assert await asyncio.wait_for(keeper.run(), 60) == 1
    assert "files cannot be watched, so all processes end: inotify watch limit reached" in caplog.text


async def test_a_word_to_a_process_that_is_being_started_is_kept():
    """Between the look whether all is to end and the process's first breath there is a moment."""
    place = Place(0)
    read = "import socket, sys; sys.exit(socket.socket(fileno=int(sys.argv[1])).recv(9) == b'stop\\n' and 7)"
    done = asyncio.create_task(place.run(lambda _, fd: [sys.executable, "-c", read, str(fd)]))
    await asyncio.sleep(0)
    assert place.process is None
    place.tell(supervisor.STOP)
    assert await done == 7


def test_each_process_serves_the_same_resources():
    run = SimpleNamespace(program_name=lambda _: "shop:app", debug=False, shard=None)
    words = worker._line(run, {"resources": ("github/*", "crm"), "kinds": None, "except_kinds": ("a",)})
    assert words[5:] == ["worker", "--resource", "github/*", "--resource", "crm", "--except-kind", "a"]
