"""What stands where: the top level, the floors' documentation, sizes, and what a wheel carries."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "deploy",
    "docs",
    "examples",
    "mkdocs.yml",
    "providers",
    "pyproject.toml",
    "resilient",
    "tests",
}
LONGEST_FILE, LONGEST_FUNCTION = 600, 70
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def tracked(*patterns):
    """Files under version control, or all there are where there is no git."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.fail("the layout is checked in a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


MODULES = [path for path in tracked("resilient/*.py", "providers/*.py") if path.suffix == ".py"]


def name(path):
    return str(path.relative_to(ROOT))


def test_the_top_level_holds_only_what_belongs_there():
    found = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert found <= TOP_LEVEL


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_each_module_says_what_it_is_and_stays_small(path):
    source = path.read_text()
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "open the file with what it owns and its rules"
    if "versions" not in path.parts and path.name != "tables.py":  # as long as what there is
        assert source.count("\n") <= LONGEST_FILE
    lengths = {(f.name, f.lineno): f.end_lineno - f.lineno + 1 for f in ast.walk(tree) if isinstance(f, FUNCTIONS)}
    assert {n: length for n, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_no_path_of_somebodys_machine():
    ours = re.compile(r"(?<![\w.:/-])/(?:home|root|work|Users)/\w")
    found = {
        f"{name(path)}:{number}"
        for path in tracked()
        if path.suffix not in (".csv", ".png")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if ours.search(line) and path != Path(__file__)
    }
    assert found == set()


def test_tests_mirror_the_floors():
    """A test file stands in the directory of the floor it tests."""
    floors = {path.name for path in (ROOT / "resilient").iterdir() if path.is_dir() and path.name[0] != "_"}
    folders = {path.relative_to(ROOT).parts[1] for path in tracked("tests/*/*.py")}
    assert folders <= floors | {"typing", "chaos", "simulation", "benchmarks", "fuzz", "examples", "providers"}


def test_a_wheel_carries_all_the_program_needs(tmp_path):
    made = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
    wanted = {name(path) for path in tracked("resilient", "providers")}
    assert wanted <= carried
    assert {"resilient/py.typed", "resilient/store/db/migrations/script.py.mako"} <= carried
    assert {part.split("/")[0] for part in carried if ".dist-info" not in part} == {"resilient", "providers"}
    assert any(part.endswith("licenses/LICENSE") for part in carried)
