"""Children that are forked behave as processes that were started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import nursery


def said(source, *arguments):
    child = nursery.start(source, *arguments, stdout=subprocess.PIPE)
    return json.loads(child.communicate(30)[0])


def test_it_runs_a_source_with_its_arguments_as_the_main_program():
    found = said("import json, sys; print(json.dumps([__name__, sys.argv, sys.modules['__main__'].__name__]))", "a", 1)
    assert found == ["__main__", ["-c", "a", "1"], "__main__"]


def test_it_runs_a_file_beside_its_neighbours(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_it.py").write_text("X = 7")
    file = tmp_path / "program.py"
    file.write_text(
        "import json, os, neighbour_of_it as n; print(json.dumps([n.X, __file__, os.environ['WORD'], os.getcwd()]))"
    )
    monkeypatch.setenv("WORD", "so")
    monkeypatch.chdir(tmp_path)
    assert said(file) == [7, str(file), "so", str(tmp_path)]


def test_how_it_ended(tmp_path):
    assert nursery.start("pass").wait(30) == 0
    assert nursery.start("import sys; sys.exit(3)").wait(30) == 3
    assert nursery.start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").wait(30) == -signal.SIGKILL
    with (tmp_path / "said").open("wb") as file:
        assert nursery.start("raise ValueError('so it is')", stderr=file).wait(30) == 1
    assert "ValueError: so it is" in (tmp_path / "said").read_text()


def test_it_hears_signals_and_what_is_written_to_it():
    child = nursery.start("import sys; print(sys.stdin.readline().strip(), flush=True)\nwhile True: pass",
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    child.stdin.write("word\n")
    child.stdin.flush()
    assert child.stdout.readline() == "word\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    child.send_signal(signal.SIGSTOP)
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert child.poll() is None
    child.send_signal(signal.SIGCONT)
    child.terminate()
    assert child.wait(30) == -signal.SIGTERM
    child.kill()  # nobody
    child.communicate()


def test_siblings_share_no_dice():
    """What is drawn from the system once a process would be the same in all of them."""
    source = """if True:
        import json, random, secrets, uuid
        from uuid_utils.compat import uuid7
        from resilient.store.accounts.secrets import new_key
        print(json.dumps([random.random(), random.Random().random(), secrets.token_hex(8), uuid7().hex[16:],
                          uuid.uuid4().hex, new_key()]))"""
    one, other = said(source), said(source)
    assert not set(one) & set(other)


@pytest.mark.xfail(sys.platform != "linux", reason="elsewhere a child is a process like any other")
def test_it_takes_its_children_with_it():
    """Also when the test process is killed."""
    program = """if True:
        import os, signal, subprocess
        from tests import nursery
        child = nursery.start("import time; time.sleep(60)")
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)"""
    root = str(Path(__file__).parents[1])
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, env={**os.environ, "PYTHONPATH": root},
                         capture_output=True, text=True, check=False)  # fmt: skip
    until = time.monotonic() + 10
    while psutil.pid_exists(int(ran.stdout)):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_one_that_is_killed_before_it_began_has_an_end_too():
    for _ in range(100):
        child = nursery.start("import time; time.sleep(60)")
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
