"""``RESILIENT_...`` and ``.env``: what comes first, what is misspelt, what ``doctor`` prints, and what it hides."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from resilient import SetupError
from resilient.settings import Settings
from resilient.store.accounts.secrets import new_key
from resilient.surface.cli import root, settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    for name in settings.options(root._command()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(settings, "_from_file", set())
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def env_file(tmp_path):
    def write(**values):
        (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))

    return write


def parsed(*words):
    """The options of a worker as its command line, the environment and ``.env`` make them."""
    settings.read_file()
    return root._command().commands["worker"].make_context("worker", list(words)).params


def test_an_option_before_the_environment_before_the_file_before_the_default(env_file, monkeypatch):
    assert parsed()["concurrency"] == Settings().concurrency == 50
    env_file(RESILIENT_CONCURRENCY=7)
    assert Settings().concurrency == 7
    assert parsed()["concurrency"] == 7
    monkeypatch.setenv("RESILIENT_CONCURRENCY", "8")
    assert parsed()["concurrency"] == Settings().concurrency == 8
    assert parsed("--concurrency", "9")["concurrency"] == Settings(concurrency=9).concurrency == 9


def test_several_resources_in_one_variable(monkeypatch):
    monkeypatch.setenv("RESILIENT_RESOURCE", "github/* crm")
    assert parsed()["patterns"] == ["github/*", "crm"]
    assert parsed("--resource", "a/b")["patterns"] == ["a/b"]


def test_the_command_line_works_with_the_files_database(env_file, run, database_url):
    env_file(RESILIENT_DATABASE=f"'{database_url}'", UNRELATED="x")
    assert run("jobs", "count") == (0, "0\n", "")
    assert "UNRELATED" not in settings.os.environ


def test_programs_and_options_have_the_same_settings():
    options = settings.options(root._command())
    fields = {field.validation_alias: field for field in Settings.model_fields.values()}
    assert fields.keys() == options.keys() | {settings.SECRETS}
    assert {name: fields[name].default for name in options} == {name: one.default for name, one in options.items()}


@pytest.mark.parametrize("address", ["u:hunter2@host/db", "postgresql:/u:hunter2@host/db", "host=h password=hunter2"])
def test_a_misspelt_address_shows_no_password(monkeypatch, address):
    """The program may have an address of its own, so that nobody else reads this one."""
    monkeypatch.setenv("RESILIENT_DATABASE", address)
    rows = {one.name: one.value for one in settings.listed(root._command(), {})}
    assert rows["RESILIENT_DATABASE"] == "[hidden]"


def test_doctor_prints_them_and_hides_what_is_secret(env_file, run, monkeypatch, sqlite_url):
    monkeypatch.setenv("RESILIENT_SECRETS", f"{new_key()},{new_key()}")
    monkeypatch.setenv("RESILIENT_GRACE", "5")
    monkeypatch.setenv("RESILIENT_DATABASE", "postgresql://ann:canary@db.example/app?password=canary")
    env_file(RESILIENT_LOG="json", RESILIENT_GRACE="6")
    status, out, err = run("--database", sqlite_url, "doctor", "--verbose")
    assert (status, err) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in out.split("\nSettings")[1].splitlines() if "RESILIENT_" in line)
    assert rows["RESILIENT_DATABASE"].split()[-1] == "option"
    assert rows["RESILIENT_GRACE"].split() == ["5", "environment"]
    assert rows["RESILIENT_LOG"].split() == ["json", ".env"]
    assert rows["RESILIENT_LEASE"].split() == ["60", "default"]
    assert rows["RESILIENT_SECRETS"].split() == ["[hidden]", "(2)", "environment"]
    status, out, _ = run("--database", sqlite_url, "doctor", "--json")
    assert {"name": "RESILIENT_GRACE", "value": "5", "source": "environment"} in json.loads(out)["settings"]


@pytest.mark.parametrize("name", ["RESILIENT_DATABASE", "RESILIENT_SECRETS"])
def test_no_secret_of_the_environment_is_printed(run, monkeypatch, sqlite_url, name):
    monkeypatch.setenv("RESILIENT_APP", "nowhere:app")
    monkeypatch.setenv(name, "postgresql://ann:canary@db.example/app?sslpassword=canary")
    rows = settings.listed(root._command(), {})
    assert [one.source for one in rows if one.name == name] == ["environment"]
    assert "canary" not in str(rows)


def test_a_misspelt_one_is_named_with_the_nearest(run, monkeypatch, sqlite_url):
    monkeypatch.setenv("RESILIENT_DATBASE", "postgresql://ann:canary@db.example/app")
    monkeypatch.setenv("RESILIENT_OF_ANOTHER", "1")
    status, out, err = run("--database", sqlite_url, "jobs", "count")
    assert (status, out) == (0, "0\n")
    assert err == "RESILIENT_DATBASE is no setting; did you mean 'RESILIENT_DATABASE'?\n"
    _, out, _ = run("--database", sqlite_url, "doctor", "--json")
    (found,) = [one for one in json.loads(out)["findings"] if one["name"] == "settings"]
    assert found["message"] == "RESILIENT_DATBASE, RESILIENT_OF_ANOTHER: in the environment, and no setting"


def test_a_value_that_does_not_fit_is_named(run, monkeypatch):
    monkeypatch.setenv("RESILIENT_APP", "shop:app")
    monkeypatch.setenv("RESILIENT_CONCURRENCY", "many")
    status, _, err = run("worker")
    assert (status, "concurrency" in err.lower()) == (2, True)
    with pytest.raises(SetupError, match=r"RESILIENT_CONCURRENCY: .*valid integer") as raised:
        Settings()
    assert "many" not in str(raised.value)


def test_a_program_takes_the_address_and_the_keys(env_file):
    key = new_key()
    env_file(RESILIENT_DATABASE="sqlite:///app.db", RESILIENT_SECRETS=f"{key} other")
    made = Settings()
    assert (made.database_address, made.keys) == ("sqlite:///app.db", [key, "other"])
    assert key not in repr(made)
    env_file()
    with pytest.raises(SetupError, match="which database"):
        Settings().database_address  # noqa: B018


def test_the_libraries_come_only_with_a_file():
    program = (
        "import sys; from resilient.surface.cli import main; main(['--help']);"
        "print([one for one in ('dotenv', 'pydantic_settings') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_guide_names_every_variable():
    text = (ROOT / "docs" / "operating.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0]
    assert {*re.findall(r"`(RESILIENT_[A-Z_]+)`", text)} - {"RESILIENT_DATBASE"} == {
        *settings.options(root._command()),
        settings.SECRETS,
    }


TOOLS = {"all", "dev", "testing", "demo", "docs", "sqlite-async"}


def test_the_extra_all_has_what_runs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*re.search(r"\[(.*)\]", extras["all"][0])[1].split(",")} == extras.keys() - TOOLS


@pytest.mark.parametrize(("shell", "file"), [("bash", ".bash_completions/resilient.sh"), ("zsh", ".zfunc/_resilient")])
def test_completion_is_installed(tmp_path, shell, file):
    command = [Path(sys.executable).parent / "resilient", "--install-completion", shell]
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "_RESILIENT_COMPLETE" in (tmp_path / file).read_text()
