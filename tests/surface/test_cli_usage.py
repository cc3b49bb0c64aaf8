"""Finding the app, wrong usage, errors as one line without secrets, exit statuses, layout."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console
from sqlalchemy.exc import OperationalError, StatementError
from typer.main import get_command

from resilient import InvalidInput, Kind, NaiveDatetime, Resilient
from resilient.engine.run.heartbeat import code_version
from resilient.surface.bench.command import app as benches
from resilient.surface.cli import exits, main, root
from resilient.surface.cli.jobs import criteria_of, moment, read_json, tags_of, until
from resilient.surface.cli.output import Output, Row


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    for name in ("RESILIENT_APP", "RESILIENT_DATABASE", "RESILIENT_SCHEMA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("shop", "broken", "leaving", "needy", "two"):
        sys.modules.pop(name, None)


# -- finding the app -------------------------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path):
    (tmp_path / "shop.py").write_text(
        "from resilient import Resilient\n"
        f"app = Resilient('sqlite:///{tmp_path / 'shop.db'}')\n"
        "number = 7\n"
        "def make(): return app\n"
        "def fails(): return app / 0\n"
        "def needs(settings): return app\n"
        "class asgi: __call__ = needs\n"
        "asgi = asgi()\n"
    )
    (tmp_path / "two.py").write_text("from shop import app as a, app as b\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "needy.py").write_text("import not_installed_anywhere\n")


@pytest.mark.parametrize("name", ["shop:app", "shop", "shop:make"])
def test_an_app_by_name(shop, run, name):
    assert run("--app", name, "jobs", "list") == (0, "There are no jobs.\n", "")


def test_options_may_stand_after_the_command_and_in_the_environment(shop, run, monkeypatch, tmp_path):
    assert run("jobs", "list", "--app=shop:app")[0] == 0
    assert json.loads(run("jobs", "count", "--json", "-A", "shop:app")[1]) == {"count": 0, "more": False}
    monkeypatch.setenv("RESILIENT_APP", "shop:app")
    assert run("jobs", "count")[0] == 0
    # What was typed wins over the environment.
    assert run("jobs", "count", "--database", f"sqlite:///{tmp_path / 'none.db'}")[0] == 4
    monkeypatch.setenv("RESILIENT_DATABASE", "sqlite:///elsewhere.db")
    assert run("jobs", "count")[0] == 0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere:app", "there is no module 'nowhere' here"),
        ("shop:nope", "shop:nope: there is no 'nope'; apps in that module: shop:app"),
        ("shop:number", "shop:number is not a Resilient app but of type int"),
        ("shop:fails", "shop:fails() makes no app: TypeError: unsupported operand"),
        ("shop:needs", "shop:needs() makes no app: TypeError: needs() missing 1 required positional argument"),
        ("shop:asgi", "shop:asgi is not a Resilient app but of type asgi"),
        ("leaving:app", "leaving cannot be imported: it calls sys.exit(3)"),
        ("two", "two names no app: write module:app; apps in that module: two:a, two:b"),
        ("shop.py", "'shop.py' is not module:app: write the import name"),
        ("broken:app", "broken cannot be imported: ZeroDivisionError: division by zero"),
        ("needy:app", "needy cannot be imported: No module named 'not_installed_anywhere'"),
    ],
)
def test_an_app_that_cannot_be_had(shop, run, name, says):
    status, out, err = run("--app", name, "jobs", "list")
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1


def test_neither_or_both(run):
    status, _, err = run("jobs", "list")
    assert (status, err.startswith("error: which app? Say --app module:app")) == (2, True)
    status, _, err = run("--app", "a:b", "--database", "sqlite:///x", "jobs", "list")
    assert (status, err) == (2, "error: give --app or --database, not both\n")
    status, _, err = run("--database", "sqlite:///x.db", "worker")
    assert (status, err.startswith("error: a worker needs the program's code")) == (2, True)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["jobs", "lst"], 2, "No such command 'lst'"),
        (["jobs", "list", "--nope"], 2, "No such option"),
        (["jobs", "list", "--limit", "0"], 2, "Invalid value for"),
        (["jobs", "list", "--state", "failed"], 2, "'failed' is not a job state"),
        (["jobs", "list", "--error-kind", "permenent"], 2, "'permenent' is not a kind of error: use one of throttled"),
        (["dead", "replay", "--error-kind", "bugs", "--yes"], 2, "'bugs' is not a kind of error"),
        (["jobs", "list", "--created-after", "soon"], 2, "--created-after/--since 'soon' is not a time"),
        (["jobs", "list", "--resource", "a b"], 2, "'a b' is not a resource pattern"),
        (["jobs", "list", "--since", "2030-01-01"], 2, "--created-after/--since '2030-01-01' has no time zone"),
        (["jobs", "list", "--since", "soon"], 2, "--created-after/--since 'soon' is not a time: write 1h (ago)"),
        (["jobs", "list", "--tag", "user"], 2, "--tag 'user': write name=value"),
        (["jobs", "show", "7"], 2, "'7' is not a job id"),
        (["jobs", "show", "01a1fda5-a9d3-71b4-9e78-fc26eaac1033"], 3, "there is no job 01a1fda5"),
        (["jobs", "cancel"], 2, "which jobs? Give their ids"),
        (["jobs", "cancel", "01a1fda5-a9d3-71b4-9e78-fc26eaac1033", "--kind", "x"], 2, "give job ids or options"),
        (["resources", "show", "no spaces"], 2, "'no spaces' is not a resource key"),
        (["resources", "pause", "a", "--for", "1h", "--until", "2199-01-01T00:00Z"], 2, "give --for or --until"),
        (["resources", "list", "--gate", "door"], 2, "'door' is not a gate"),
        (["enqueue", "nope", "-r", "a"], 2, "no handler is declared for kind 'nope'"),
        (["enqueue", "nope", "{", "-r", "a"], 2, "the payload is not JSON"),
        (["enqueue", "nope", "@nofile", "-r", "a"], 2, "cannot read nofile"),
        (["prune", "--older-than", "long"], 2, "--older-than 'long' is not a length of time: write 90s"),
        (["prune", "--state", "ded"], 2, "'ded' is no state in which jobs are pruned: use cancelled, dead, succeeded"),
        (
            ["resources", "limit", "a", "--breaker", "streek=3"],
            2,
            "a breaker policy has no 'streek', only streak, ratio",
        ),
        (["resources", "limit", "a", "--clear", "limit"], 2, "nothing to clear is called 'limit': a policy has limits"),
        (
            ["worker", "--except-kind", "mail.sned"],
            2,
            "no handler is declared for 'mail.sned'; those of this app are: none",
        ),
        (["worker", "--log-level", "loud"], 2, "--log-level 'loud'"),
        (["enqueue", "nope", "-r", "a", "--delay", "10"], 2, "--delay '10' is not a length of time: write 90s"),
        (["resources", "pause", "a", "--for", "soon"], 2, "--for 'soon' is not a length of time: write 90s"),
        (["workflows", "show", "x"], 2, "'x' is not a workflow id"),
        (["jobs", "edit", "01a1fda5-a9d3-71b4-9e78-fc26eaac1033"], 2, "nothing to edit: say --payload, --priority"),
        (["resources", "limit", "a"], 2, "nothing to set: say --limit, --no-limits"),
        (["jobs", "list", "--order", "up"], 2, "Invalid value for '--order': 'up' is not one of"),
        (["schedules", "show", "nope"], 3, "there is no schedule 'nope'; known are: none"),
        (["connections", "show", "a/b"], 3, "a/b has no connection: see `resilient --app shop:app connections list`"),
        (["outbox", "show", "x"], 3, "there is no event x"),
        (["sync", "reset", "x"], 3, "no stream 'x' was read there"),
    ],
)
def test_wrong_usage_is_one_line(shop, run, arguments, status, says):
    code, out, err = run("--app", "shop:app", *arguments)
    assert (code, out) == (status, "")
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["why", "7"], "Did you mean `resilient jobs why` or `resilient resources why`? (see `resilient --help`)"),
        (["replay"], "Did you mean `resilient dead replay` or `resilient outbox replay`?"),
        (["job", "list"], "Did you mean 'jobs'?"),
        (["jobs", "list", "--database"], "--database needs a value, such as sqlite:///app.db or postgresql://"),
        (["--app", "--json", "status"], "--app needs a value, such as shop.jobs:app"),
    ],
)
def test_what_was_meant_is_said(run, arguments, says):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert says in err


@pytest.mark.parametrize("command", ["show", "why"])
def test_a_resource_that_nobody_used_is_more_likely_a_slip(shop, run, command):
    status, _, err = run("--app", "shop:app", "resources", command, "githb/acct-7")
    assert status == 3
    assert err == (
        "error: there is no job of githb/acct-7, and never was one: is the key right? `resilient --app shop:app"
        " resources list` shows those in use\n"
    )
    assert "is the key right?" in run("--app", "shop:app", "resources", "pause", "githb/acct-7")[1]
    assert run("--app", "shop:app", "resources", command, "githb/acct-7")[::2] == (0, "")  # somebody did


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["jobs", "list"], "There are no jobs."),
        (["dead", "list"], "No job is dead."),
        (["resources", "list"], "No resource is in use yet."),
        (["resources", "list", "--stopped"], "No resource is stopped."),
        (["resources", "list", "git*"], "No resource in use fits 'git*'; * stays within its segment, 'git*/**' is"),
        (["schedules", "list"], "There are no schedules."),
        (["workflows", "list"], "There are no workflows."),
        (["outbox", "list"], "There are no events."),
        (["outbox", "list", "--type", "x"], "No event fits."),
        (["sync", "status"], "No stream was read yet."),
        (["sync", "status", "issues"], "No stream that was read fits."),
        (["connections", "list"], "There are no connections."),
        (["connections", "list", "github"], "No connection fits."),
        (["prune"], "Deleted nothing."),
    ],
)
def test_an_empty_database(shop, run, arguments, says):
    status, out, err = run("--app", "shop:app", *arguments)
    assert (status, err) == (0, "")
    assert out.startswith(says)


@pytest.mark.parametrize(
    ("pattern", "below"),
    [("github/*", "; * stays within its segment, 'github/**' is everything below"), ("github/**", "")],
)
def test_a_pattern_that_means_nothing_changes_nothing_and_says_so(shop, run, pattern, below):
    for options in (["pause", pattern, "--yes"], ["pause", pattern, "--dry-run"], ["resume", pattern, "--yes"]):
        status, out, err = run("--app", "shop:app", "resources", *options)
        assert (status, out) == (3, "")
        assert err == (
            f"error: nothing was changed: no resource in use and no job in the queue fits {pattern!r}{below}\n"
        )


def test_a_wrong_address_names_where_it_was_said(run, monkeypatch):
    assert run("--database", "nonsense", "status")[2].startswith("error: --database: that is not a database address")
    monkeypatch.setenv("RESILIENT_DATABASE", "nonsense")
    assert run("status")[2].startswith("error: RESILIENT_DATABASE: that is not a database address")


def test_the_doctor_says_once_what_a_missing_file_wants(run):
    status, out, _ = run("--database", "sqlite:///none.db", "doctor")
    assert (status, out.count("does not exist")) == (1, 1)
    assert "none.db does not exist: `resilient --database sqlite:///none.db db upgrade` creates it; or" in out


@pytest.mark.parametrize(
    ("url", "status", "says"),
    [
        ("sqlite:///none.db", 4, "does not exist: `resilient --database sqlite:///none.db db upgrade` creates it"),
        ("postgresql://anna:geheim@127.0.0.1:1/x", 4, "Connection refused"),
        ("mysql://anna:geheim@h/x", 2, "'mysql' databases are not supported"),
        ("anna:geheim", 2, "that is not a database address"),
    ],
)
def test_a_database_that_does_not_answer(run, url, status, says):
    code, out, err = run("--database", url, "jobs", "list")
    assert (code, out) == (status, "")
    assert says in err
    assert "geheim" not in err
    assert err.count("\n") == 1


def test_debug_shows_where(shop):
    with pytest.raises(InvalidInput):
        main(["--app", "shop:app", "--debug", "jobs", "show", "7"])


def test_unforeseen_errors_are_one_line_too(shop, run, monkeypatch):
    def fail(*_a, **_k):
        raise RuntimeError("boom\nsecond line")

    monkeypatch.setattr("resilient.store.jobs.queries.page", fail)
    monkeypatch.setattr("resilient.engine.jobs.api.queries.page", fail)
    status, _, err = run("--app", "shop:app", "jobs", "list")
    assert (status, err) == (1, "error: RuntimeError: boom second line (--debug shows where)\n")


def test_what_the_database_says_never_quotes_values():
    message = Exception("no space left\nDETAIL: Key (payload)=(geheim)")
    error = OperationalError("INSERT ...", {"p": "geheim"}, message)
    assert exits.line_of(error) == "the database refused: no space left"
    assert exits.status_of(error) == exits.DATABASE


def test_a_statement_that_was_never_sent_does_not_show_its_values():
    error = StatementError("date value out of range", "UPDATE x SET y = ?", ("secret",), OverflowError("too large"))
    assert exits.line_of(error) == "the database refused: too large"


def test_a_payload_that_cannot_be_read_is_wrong_usage(tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "deep").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(InvalidInput, match="cannot read binary: it is not text in UTF-8"):
        read_json("@binary")
    with pytest.raises(InvalidInput, match="nested too deeply"):
        read_json("@deep")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    with pytest.raises(InvalidInput, match="cannot read standard input"):
        read_json("-")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InvalidInput, match="not JSON"):
        read_json("-")


@pytest.mark.parametrize("words", ["--json db check", "--help", "db check", "jobs list"])
@pytest.mark.parametrize("buffered", [True, False])
def test_what_is_written_to_a_closed_pipe_is_no_failure(shop, run, words, buffered):
    run("--app", "shop:app", "db", "upgrade")
    flag = "" if buffered else "-u "
    command = f"{sys.executable} {flag}-m resilient.surface.cli --app shop:app {words}"
    # The reader is gone before the first word is written: it has closed the pipe, and says so.
    script = f"mkfifo end; {{ read -r _ < end; {command}; echo $? >&2; }} | {{ exec <&-; echo > end; }}"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env)
    assert done.stderr == "0\n"


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape", "latin-1", "cp1252", "utf-8"])
def test_what_the_locale_cannot_write_ends_no_command(shop, tmp_path, encoding):
    """A stranger's words (an error, a payload, a tag) stand in most screens: the rest of them has to be read, too."""
    payload = {"name": "Zoë → 🎉"}
    app = Resilient(f"sqlite:///{tmp_path / 'shop.db'}")
    job = str(app.enqueue_sync(Kind("push"), payload, resource_key="crm/a", tags={"who": "Zoë 🎉"}).id)
    env = {**os.environ, "PYTHONIOENCODING": encoding}

    def say(*words):
        command = [sys.executable, "-m", "resilient.surface.cli", "--app", "shop:app", *words]
        done = subprocess.run(command, capture_output=True, env=env, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode(encoding.partition(":")[0])

    assert json.loads(say("jobs", "show", job, "--json"))["job"]["payload"] == payload
    assert any(payload == json.loads(line).get("payload") for line in say("export", "crm/a").splitlines())
    screen = say("jobs", "show", job)
    assert "Zo" in screen
    assert screen.index("Zo") < screen.index("Why"), "it is written to its end"


def test_interrupted_and_a_closed_pipe(monkeypatch, run):
    def interrupt(_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(root, "run", interrupt)
    assert run("jobs", "list")[0] == 130
    script = "import sys; from resilient.surface.cli import main; sys.exit(main(['--help']))"
    pipe = f'{sys.executable} -c "{script}" | head -1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("0", "")


def test_a_reader_that_is_gone_is_no_failure():
    script = "import sys; from resilient.surface.cli import main; sys.exit(main(['providers', 'list']))"
    pipe = f'{sys.executable} -c "{script}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


# -- help ------------------------------------------------------------------------------------------------------------


def commands(command, path=()):
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_every_command_has_help_that_fits_80_columns(run, monkeypatch):
    import typer

    monkeypatch.setenv("COLUMNS", "80")
    count = 0
    for path, command in commands(typer.main.get_command(root.cli)):
        if path and path[0] in root.OWN_OPTIONS:
            continue
        status, out, err = run(*path, "--help")
        assert (status, err) == (0, "")
        assert command.help
        assert max(map(len, out.splitlines())) <= 80
        assert "..." not in out.partition("Commands:")[2], f"{path}: a first sentence is too long"
        assert not re.search(r"^  -.*<(str|int|float|list|path|dir)", out, re.MULTILINE), f"{path}: words of Python's"
        if not path:
            assert "Exit status: 0 done; 1 it could not be done" in " ".join(out.split())
        else:
            assert "see `resilient --help`" in " ".join(out.split())
        count += 1
    assert count > 30


def test_a_shell_completes_commands():
    words = {"_RESILIENT_COMPLETE": "complete_bash", "COMP_WORDS": "resilient era", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from resilient.surface.cli import main; main()"]
    done = subprocess.run(command, env={**os.environ, **words}, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["erase"], "")


def test_the_version_is_the_one_that_workers_report(run):
    status, out, err = run("--version")
    assert (status, out, err) == (0, f"resilient {code_version()}\n", "")
    assert re.fullmatch(r"resilient \d+\.\d+\.\d+\n", out)


def test_no_arguments_show_the_help(run):
    assert run()[0] == 2
    status, out, err = run("jobs")
    assert (status, err) == (2, "")
    assert out.startswith("Usage: resilient jobs")


def test_bench_and_demo_keep_their_own_options(run):
    assert root.hoisted(["bench", "drain", "--database", "x", "--json"]) == [
        "bench",
        "drain",
        "--database",
        "x",
        "--json",
    ]
    assert root.hoisted(["jobs", "list", "--json", "--app", "a:b"]) == ["--json", "--app", "a:b", "jobs", "list"]
    assert root.hoisted(["enqueue", "k", "--", "--json"]) == ["enqueue", "k", "--", "--json"]
    status, _, err = run("demo", "--workers", "1")
    assert (status, "--workers" in err) == (2, True)
    for command in (["bench"], ["bench", "drain"], ["demo"]):
        status, out, err = run(*command, "-h")
        assert (status, err) == (0, "")
        assert out.startswith(f"Usage: resilient {' '.join(command)} ")
        assert not re.search(r"^  -.*(<[a-z]| TEXT )", out, re.MULTILINE)
        assert "--app" not in out  # it takes none
        assert "..." not in out.partition("Commands:")[2]


# -- options ---------------------------------------------------------------------------------------------------------


def test_times():
    assert moment("-", "90s") == timedelta(seconds=90)
    assert moment("-", "+1h") == timedelta(hours=-1)
    assert moment("-", "2030-01-31T12:00Z") == datetime(2030, 1, 31, 12, tzinfo=UTC)
    assert moment("-", "2030-01-31T12:00+02:00") == datetime(2030, 1, 31, 10, tzinfo=UTC)
    for wrong, error in (("2030-01-31", NaiveDatetime), ("next tuesday", InvalidInput), ("1", InvalidInput)):
        with pytest.raises(error):
            moment("-", wrong)
    assert until("--until", "15m", None) == timedelta(minutes=15)
    assert until("--until", None, "+15m") == timedelta(minutes=15)
    assert until("--until", None, None) is None


def test_criteria_leave_out_what_was_not_said():
    assert criteria_of({"state": [], "kind": ["a"], "within": None, "tag": ["a=b=c", "d="]}) == {
        "kind": ["a"], "tags": {"a": "b=c", "d": ""}
    }  # fmt: skip
    with pytest.raises(InvalidInput):
        tags_of(["=x"])


# -- layout ----------------------------------------------------------------------------------------------------------


def table(width, **options):
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system=None,
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    rows = [
        Row(
            "0195f3a2-7c1e",
            "dead",
            "mail.send",
            "github/account-77",
            1204,
            remark="HTTP 422: no such thing here",
            folded="mail.send on github/account-77",
        )
    ]
    Output(console=console).table(("ID", "STATE", "KIND", "RESOURCE", "N"), rows, right=(4,), **options)
    return console.file.getvalue().splitlines()


def test_a_table_where_there_is_room():
    assert table(80) == [
        "ID             STATE  KIND       RESOURCE              N",
        "0195f3a2-7c1e  dead   mail.send  github/account-77  1204",
        "  HTTP 422: no such thing here",
    ]


def test_a_narrow_table_folds_then_cuts():
    assert table(40, folds=(2, 3)) == [
        "ID             STATE     N",
        "0195f3a2-7c1e  dead   1204",
        "  mail.send on github/account-77: HTTP …",
    ]
    assert table(50)[1] == "0195f3a2-7c1e  dead   mail.send  github/acc…  1204"


def test_what_is_copied_stays_whole():
    assert table(24, folds=(2, 3))[:3] == [
        "ID           STATE     N",
        "0195f3a2-7c1e",
        "             dead   1204",
    ]


def test_a_file_gets_everything():
    out = io.StringIO()
    console = Console(file=out, width=20, highlight=False, markup=False, soft_wrap=True)
    Output(console=console).table(("ID", "TEXT"), [Row("x" * 30, "[bold]y[/bold]" * 9, remark="z" * 50)])
    assert "[bold]y[/bold]" * 9 in out.getvalue()
    assert "z" * 50 in out.getvalue()


# -- what the documentation says ---------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
PRINTED = [
    (page.name, match[1] or match[2])
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for match in re.finditer(r"`(resilient [^`\n]+)`|^(?:\$ )?(resilient [^\n]+)$", page.read_text(), re.MULTILINE)
]


command_of = cache(get_command)  # typer takes a tenth of a second to make all of them


@pytest.mark.parametrize(("page", "line"), PRINTED)
def test_every_command_that_the_pages_print_is_one(page, line):
    line, _, _ = line.partition(" > ")  # into a file
    words = iter(shlex.split(re.sub(r"[\[\]]", "", line), comments=True)[1:])
    command, places = command_of(root.cli), 0
    options = {name: param for param in command.params for name in param.opts}
    for word in words:
        if hasattr(command, "commands") and not word.startswith("-"):
            assert word in command.commands, f"{page}: {line}"
            command = command_of(benches) if word == "bench" else command.commands[word]  # it is imported when called
            options |= {name: param for param in command.params for name in param.opts}
        elif word.startswith("-"):
            assert command.ignore_unknown_options or word in options, f"{page}: {line}"
            if not getattr(options.get(word), "is_flag", False):
                next(words)
        else:
            places += 1
    counts = [param.nargs for param in command.params if param.param_type_name == "argument"]
    assert -1 in counts or places <= sum(counts), f"{page}: {line}"


def test_jobs_are_shown_without_what_their_kind_hides(run, tmp_path):
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    (tmp_path / "shop.py").write_text(
        "from resilient import Resilient, handler\n"
        "@handler('pay', redact=['number'])\nasync def pay(job): ...\n"
        f"app = Resilient({url!r}, handlers=[pay])\n"
    )
    job = Resilient(url).sync.enqueue(Kind("pay"), {"number": "4242", "to": "Ada"}, resource_key="bank/1")
    for words in (["jobs", "show", str(job.id)], ["--json", "jobs", "show", str(job.id)], ["--json", "jobs", "list"]):
        status, out, _ = run("--app", "shop:app", *words)
        assert (status, "Ada" in out, "4242" in out, "[hidden]" in out) == (0, True, False, True)
    assert "4242" in run("--database", url, "jobs", "show", str(job.id))[1]  # only the program's code knows
