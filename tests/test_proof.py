"""`make proof`: a piece that held is not run again, one that was cut off or failed is, and all are shown."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import proof
from tests.benchmarks import bench_long

WRITE = "import sys; open(sys.argv[1], 'a').write('x')"


def counting(path, then="print('12 things')"):
    return [sys.executable, "-c", f"{WRITE}; {then}", str(path)]


@pytest.fixture
def root(tmp_path):
    """A folder with a piece of code in it."""
    (tmp_path / "resilient").mkdir()
    (tmp_path / "resilient" / "a.py").write_text("1")
    return tmp_path


def run(root, *pieces):
    said = []
    runner = proof.Runner(root / ".proof", root=root, say=said.append)
    return runner.run(pieces), said, runner


def test_what_held_is_not_run_again_until_the_code_changes(root):
    piece = proof.Piece("one", counting(root / "ran"))
    assert run(root, piece)[0] == 0
    status, said, runner = run(root, piece)
    assert status == 0
    assert (root / "ran").read_text() == "x"
    assert said[-2].split() == ["one", "held", "12", "things", f"{runner.rows[0][1]['seconds']}", runner.commit]
    assert said[-1] == "1 of 1 pieces held"
    (root / "resilient" / "a.py").write_text("2")
    run(root, piece)
    assert (root / "ran").read_text() == "xx"


def test_a_word_that_means_no_piece_is_refused():
    assert {piece.name.split(":")[0] for piece in proof.chosen(["docs", "table"])} == {"docs", "table"}
    with pytest.raises(SystemExit, match="no piece has 'tabel' in its name"):
        proof.chosen(["docs", "tabel"])


def test_another_size_of_a_piece_is_another_piece(root):
    for argument in ("1", "2", "1"):
        run(root, proof.Piece("one", [*counting(root / "ran"), argument]))
        run(root, proof.Piece("one", counting(root / "ran"), {"SECONDS": argument}))
    assert (root / "ran").read_text() == "xxxx"


def test_what_failed_is_shown_and_run_again(root):
    bad = proof.Piece("bad", counting(root / "ran", "sys.exit('it broke')"))
    good = proof.Piece("good", counting(root / "good"))
    for ran in ("x", "xx"):
        status, said, _ = run(root, bad, good)
        assert status == 1
        assert (root / "ran").read_text() == ran
        assert any("it broke" in line for line in said)
        assert said[-1] == "1 of 2 pieces held"
    assert (root / "good").read_text() == "x"


def test_a_note_that_was_cut_off_is_none(root):
    piece = proof.Piece("one", counting(root / "ran"))
    run(root, piece)
    (note,) = (root / ".proof").glob("*.json")
    note.write_text(note.read_text()[:20])
    run(root, piece)
    assert (root / "ran").read_text() == "xx"


DRIVER = """
import signal, sys
from pathlib import Path
from tests import proof
from tests.benchmarks import bench_long
root = Path(sys.argv[1])
write = "import sys; open(sys.argv[1], 'a').write('x')"
hangs = write + "; import os, time, pathlib; here = pathlib.Path(sys.argv[1] + '-go'); pid = os.getpid();"
hangs += "pathlib.Path(sys.argv[1] + '-pid').write_text(str(pid))\\nwhile not here.exists(): time.sleep(0.01)"
proof.pieces = lambda scale: [
    proof.Piece("first", [sys.executable, "-c", write, str(root / "first")]),
    proof.Piece("second", [sys.executable, "-c", hangs, str(root / "second")]),
    proof.Piece("third", [sys.executable, "-c", write, str(root / "third")]),
]
proof.Runner.__init__.__defaults__ = (root / ".proof",)
proof.Runner.__init__.__kwdefaults__["root"] = root
sys.exit(proof.main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_it_goes_on_where_it_was_killed(root, how):
    command = [sys.executable, "-c", DRIVER, str(root)]
    environment = {**os.environ, "PYTHONPATH": str(proof.ROOT), "PIECES": ""}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    within(lambda: (root / "second-pid").exists() and (root / "second-pid").read_text())
    pid = int((root / "second-pid").read_text())
    first.send_signal(how)
    said, _ = first.communicate(timeout=60)
    if how == signal.SIGKILL:  # nobody was left to end it
        os.kill(pid, signal.SIGKILL)
    else:
        assert "make proof goes on from here" in said
        assert first.returncode == 130
        within(lambda: not alive(pid))
    (root / "second-go").touch()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert again.returncode == 0, again.stderr
    assert [(root / name).read_text() for name in ("first", "second", "third")] == ["x", "xx", "x"]
    assert again.stdout.splitlines()[-1] == "3 of 3 pieces held"


def within(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_piece_has_a_name_of_its_own_and_a_command_that_exists():
    every = list(proof.pieces())
    assert len({piece.name for piece in every}) == len(every)
    kinds = {piece.name.partition(":")[0] for piece in every}
    few = {"pairs", "threes", "simulation", "table", "mutation", "fuzz", "chaos"}
    assert kinds == few | {"soak", "long", "throttle", "docs", "lowest", "uvloop", "rest", "features"}
    made = [piece.command[1] for piece in every if piece.command[0] == "make"]
    assert made == ["docs", "lowest"]
    makefile = (proof.ROOT / "Makefile").read_text()
    assert all(f"\n{target}: " in makefile for target in made)
    for piece in every:
        if piece.command[0] == "make":
            continue
        module = piece.command[piece.command.index("-m") + 1]
        assert module == "pytest" or (proof.ROOT / (module.replace(".", "/") + ".py")).exists()


def test_every_piece_of_pytests_is_understood():
    """A command ends with 4 where pytest does not know an option, before it has collected anything."""
    commands = {tuple(word for word in piece.command if not word.startswith("tests/")) for piece in proof.pieces()}
    commands = [command for command in commands if "pytest" in command]
    assert len(commands) > 3
    for command in commands:
        whole = [*command, "tests/test_nothing.py"]
        done = subprocess.run(whole, cwd=proof.ROOT, capture_output=True, text=True, check=False)
        assert "file or directory not found: tests/test_nothing.py" in done.stderr, done.stderr


def stretch(**changed):
    return {"jobs": 100, "per_second": 900, "cpu_us": 100, "table_mb": 20.0, "indexes_mb": 10.0, "wrong": []} | changed


@pytest.mark.parametrize(
    ("last", "failure"),
    [
        ({}, []),
        ({"cpu_us": 111}, []),
        ({"cpu_us": 112}, ["it became slower"]),
        ({"table_mb": 25.0}, []),
        ({"table_mb": 25.1}, ["it grew"]),
        ({"indexes_mb": 12.6}, ["it grew"]),
        ({"indexes_mb": 12.6, "per_second": 1000}, []),  # more is kept of what is done faster
        ({"wrong": ["a job ran twice"]}, ["rules were broken"]),
    ],
)
def test_a_long_run_fails_by_its_pace_its_size_and_what_is_wrong(last, failure):
    failures, figures = bench_long.verdict([stretch()] * 9 + [stretch(**last)])
    assert failures == failure
    assert figures.startswith("1,000 jobs: pace x")


@pytest.mark.parametrize(
    ("said", "figure"),
    [
        ("", ""),
        ("a\n===== 3 passed in 1.2s =====\n", "3 passed in 1.2s"),
        (json.dumps({"seeds": 5000, "failed": [], "jobs": 12}), "5,000 seeds, 12 jobs"),
        ("{no json}", "{no json}"),
        ("x" * 200, "x" * 71 + "…"),
    ],
)
def test_the_figure_is_what_a_piece_says_last(said, figure):
    assert proof.figure(said) == figure
