"""What a provider, tenant, sender or end user wrote reaches the log and the terminal through one place each.

A call that goes around it fails here: by the source, and by the loggers that the modules make.
"""

import ast
import importlib
import logging
import pkgutil
from pathlib import Path

import pytest

import resilient
from resilient.core.base.bounds import LOGGED_TEXT, LOGGED_TRACEBACK
from resilient.core.base.loggers import logger, make_harmless
from resilient.surface.cli.output import Output, Row

ROOT = Path(__file__).parents[1]
MODULES = sorted([*(ROOT / "resilient").rglob("*.py"), *(ROOT / "providers").rglob("*.py")])
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
# Who may ask for a logger by its name: the place that makes ours harmless, and who bends those of libraries.
LOGGERS = {"resilient/core/base/loggers.py", "resilient/wire/requests/redact.py", "resilient/surface/cli/logs.py"}
# Who may print: the place that makes it harmless, and programs that show nothing but what they made themselves.
PRINTERS = {"resilient/surface/cli/output.py", "resilient/surface/cli/root.py"}
OWN = ("resilient/surface/demo/", "resilient/surface/bench/", "resilient/testing/")
PRINTS = {"print", "echo", "secho", "print_exception", "print_exc", "input"}
PRINTS |= {"sys.stdout.write", "sys.stderr.write", "warnings.warn"}
HOSTILE = "a\x1b[31mred\x1b]0;title\x07\x9b2J\u202egnp\n2030-01-01 ERROR forged\r\nline\u2028two\x00\ud800"
OBEYED = set("\x1b\x07\x9b\u202e\u2028\r\x00\ud800")


def calls():
    """Every call of the project: where, what is called, the last name of that, and the call."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                whole = ast.unparse(node.func)
                yield str(path.relative_to(ROOT)), node.lineno, whole, whole.rpartition(".")[2], node


def test_every_module_logs_templates_with_arguments_through_a_harmless_logger():
    found = []
    for path, line, whole, last, node in calls():
        around = last == "getLogger" or (whole.startswith("logging.") and last in LEVELS)
        if around and path not in LOGGERS:
            found.append(f"{path}:{line}: use core.loggers.logger")
        elif whole.startswith("log.") and last in LEVELS:
            template = node.args[last == "log"]
            if not isinstance(template, ast.Constant) or "\n" in template.value:
                found.append(f"{path}:{line}: log one line's template, and what it tells as arguments")
    assert found == []


def test_every_module_prints_through_the_output():
    found = [
        f"{path}:{line}: use Output"
        for path, line, whole, last, _ in calls()
        if (last in PRINTS or whole in PRINTS) and path not in PRINTERS and not path.startswith(OWN)
    ]
    assert found == []


def test_every_logger_of_the_engine_is_harmless():
    for info in pkgutil.walk_packages(resilient.__path__, "resilient."):
        if not info.name.endswith("__main__") and ".migrations" not in info.name:
            importlib.import_module(info.name)
    made = {n: one for n, one in logging.root.manager.loggerDict.items() if n.startswith("resilient.")}
    made = {n: one for n, one in made.items() if isinstance(one, logging.Logger)}
    assert len(made) > 8
    assert [n for n, one in made.items() if make_harmless not in one.filters] == []


def written(caplog, template="%s", *args, **options):
    """The log as a file has it."""
    logger("trial").error(template, *args, **options)
    return logging.Formatter("%(levelname)s %(message)s").format(caplog.records[-1])


class Sly(Exception):
    def __str__(self):
        raise RuntimeError(HOSTILE)


def test_an_argument_is_one_harmless_line_of_a_bounded_length(caplog):
    for value in (HOSTILE, ValueError(HOSTILE), [HOSTILE], {"a": HOSTILE}, Sly()):
        line = written(caplog, "%s of %d in %.1f s: %r", value, 3, 1.5, value)
        assert "\n" not in line
        assert not OBEYED & set(line)
        assert " of 3 in 1.5 s: " in line
    assert len(written(caplog, "%s", "x" * 10**6)) < LOGGED_TEXT.value + 10
    assert written(caplog, "%(what)s", {"what": HOSTILE}).count("\n") == 0
    assert written(caplog, "%s and %s", None, 2) == "ERROR None and 2"


@pytest.mark.parametrize(
    "text",
    ["Bearer canary-123", "password='canary-123'", "https://u:canary-123@host/x?key=canary-123", "api_key=canary-1"],
)
def test_credentials_in_the_usual_notations_are_masked(caplog, text):
    assert "canary" not in written(caplog, "it said: %s", text)
    error = ValueError(text)
    assert "canary" not in written(caplog, "it failed", exc_info=error)


@pytest.mark.parametrize("error", [ValueError(HOSTILE), Sly()])
def test_no_line_of_a_traceback_passes_for_a_line_of_the_log(caplog, error):
    def cause():
        raise error

    try:
        cause()
    except Exception:  # noqa: BLE001 - whatever it is
        text = written(caplog, "it failed", exc_info=True)
    first, *rest = text.split("\n")
    assert first == "ERROR it failed"
    assert len(rest) >= 1
    assert all(line.startswith("    ") for line in rest)
    assert not OBEYED & set(text)
    assert caplog.records[-1].exc_info[1] is error  # for error trackers


def test_of_a_long_traceback_the_end_is_kept(caplog):
    def deep(n):
        return deep(n - 1) if n else "x" * 10**6 + 1

    try:
        deep(100)
    except TypeError:
        text = written(caplog, "it failed", exc_info=True)
    assert len(text) < 1.5 * LOGGED_TRACEBACK.value
    assert text.endswith('TypeError: can only concatenate str (not "int") to str')


def test_no_line_break_of_a_stranger_begins_a_line_on_the_terminal(capsys):
    out = Output()
    forged = "x\nstate    succeeded"
    out.table(("id", "error"), [Row(forged, forged, remark=forged), Row(1, 2, remark=forged, whole=True)])
    out.fields([("error", forged)])
    out.paragraph(forged)
    out.error(forged)
    shown = capsys.readouterr()
    assert not any(line.startswith("state") for line in (shown.out + shown.err).splitlines())
