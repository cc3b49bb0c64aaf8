"""Tests in forked processes: `tests.forks`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return tmp_path


def command(folder, *options):
    """Two processes run the tests of this folder."""
    options = ["-p", "tests.forks", "--forks=2", "-p", "no:cacheprovider", *options]
    return [sys.executable, "-m", "pytest", "--rootdir", str(folder), *options, str(folder)]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "CI": ""}
ENVIRONMENT["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"


def run(folder, *options, **files):
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(textwrap.dedent(text))
    return subprocess.run(
        command(folder, *options), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )


def test_each_file_runs_in_one_process_and_in_its_order(folder):
    text = """
        import os, pathlib, pytest

        @pytest.mark.parametrize("n", range(3))
        def test_that(n, tmp_path, request):
            with (pathlib.Path(__file__).parent / "log").open("a") as log:
                log.write(f"{os.getpid()} {pathlib.Path(__file__).stem} {n} {tmp_path}\\n")
    """
    ended = run(folder, "-q", one=text, two=text, three=text)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "9 passed" in ended.stdout
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    for name in ("test_one", "test_two", "test_three"):
        own = [line for line in lines if line[1] == name]
        assert len({pid for pid, *_ in own}) == 1
        assert [n for _, _, n, _ in own] == ["0", "1", "2"]
    assert len({path for *_, path in lines}) == 9
    assert str(os.getpid()) not in {pid for pid, *_ in lines}


def test_what_a_failing_test_printed_is_shown_with_it(folder):
    text = """
        import warnings

        def test_good():
            print("of the good one")

        def test_bad():
            print("of the bad one")
            warnings.warn("a warning of the bad one")
            assert {0} == 1
    """
    ended = run(folder, "-v", one=text.format(3), two=text.format(2))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "2 failed, 2 passed" in ended.stdout
    assert ended.stdout.count("\nof the bad one\n") == 2
    assert "of the good one" not in ended.stdout
    assert "UserWarning: a warning of the bad one" in ended.stdout


def test_a_process_that_dies_fails_its_test_and_another_does_the_rest(folder):
    dying = """
        import os, signal

        def test_before():
            pass

        def test_dying():
            os.kill(os.getpid(), signal.SIGKILL)

        def test_after():
            pass
    """
    ended = run(folder, "-q", one=dying, two="def test_other(): pass", three="def test_other(): pass")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 failed, 4 passed" in ended.stdout
    assert "the process that ran this test ended with -9 in the middle of it" in ended.stdout
    assert "test_one.py::test_dying" in ended.stdout


def test_fixtures_end_with_what_they_are_for(folder):
    text = """
        import pathlib, pytest

        LOG = pathlib.Path(__file__).parent / f"{{pathlib.Path(__file__).stem}}.log"

        @pytest.fixture(scope="session")
        def whole():
            yield
            with LOG.open("a") as log: log.write("session ")
            {0}

        @pytest.fixture(scope="module")
        def module(whole):
            yield
            with LOG.open("a") as log: log.write("module ")

        def test_it(module):
            pass
    """
    ended = run(folder, "-q", one=text.format("raise ValueError('at the very end')"), two=text.format("pass"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "at the very end" in ended.stdout
    assert (folder / "test_one.log").read_text() == (folder / "test_two.log").read_text() == "module session "


def test_what_fails_outside_of_tests_fails_the_run(folder):
    text = """
        import pytest

        @pytest.fixture(scope="session")
        def whole():
            yield
            {0}

        def test_it(whole):
            pass
    """
    ended = run(folder, "-q", one=text.format("pytest.fail('no exception')"), two=text.format("pass"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "no exception" in ended.stdout
    ended = run(folder, "-q", one=text.format("import os; os._exit(5)"), two=text.format("pass"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "ended with 5, not in the middle of a test" in ended.stdout


def test_a_process_that_leaves_another_behind_is_not_waited_for(folder):
    leaving = """
        import os, time

        def test_it():
            if os.fork() == 0:
                time.sleep(100)
                os._exit(0)
    """
    (folder / "test_one.py").write_text(textwrap.dedent(leaving))
    with (folder / "out").open("w") as out:  # a pipe would be open for as long as what is left
        ended = subprocess.run(command(folder, "-q"), cwd=folder, env=ENVIRONMENT, stdout=out, timeout=50, check=False)
    assert ended.returncode == 0, (folder / "out").read_text()


@pytest.mark.parametrize("count", ["-1", "x", "1.5"])
def test_a_number_that_is_none_is_refused(folder, count):
    ended = run(folder, "-q", f"--forks={count}", one="def test_it(): pass")
    assert ended.returncode == 4
    assert f"--forks={count}: give a number, or auto" in ended.stdout + ended.stderr


def test_the_first_failure_ends_a_run_that_is_to_end_with_it(folder):
    slow = "import time\ndef test_slow(): time.sleep(0.2)\ndef test_slower(): time.sleep(0.2)"
    bad = "def test_bad(): assert 0\ndef test_never(): raise SystemExit(3)"
    ended = run(folder, "-q", "-x", a=bad, **{f"n{n}": slow for n in range(8)})
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "stopping after 1 failures" in ended.stdout
    assert "1 failed" in ended.stdout
    assert "test_never" not in ended.stdout
    assert "16 passed" not in ended.stdout


def test_an_interrupted_run_ends_what_its_processes_have_started(folder):
    (folder / "test_one.py").write_text(
        textwrap.dedent("""
            import pathlib, pytest, time

            HERE = pathlib.Path(__file__).parent

            @pytest.fixture(scope="session")
            def server():
                yield
                (HERE / "closed").touch()

            def test_it(server):
                (HERE / "begun").touch()
                time.sleep(60)
        """)
    )
    process = subprocess.Popen(
        command(folder, "-q"), cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (folder / "begun").exists():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.02)
    children = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 2, text
    assert (folder / "closed").exists()
    assert not any(child.is_running() for child in children)
