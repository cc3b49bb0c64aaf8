"""``resilient providers``: what it shows, and that a new provider can be filled in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from datetime import date
from pathlib import Path

import pytest

from resilient import (
    ApiKey,
    Basic,
    BatchEndpoint,
    Errors,
    FailureKind,
    Idempotency,
    Incremental,
    Limit,
    LinkHeader,
    Provider,
    WaitDialect,
    Webhook,
    Word,
    providers_by_name,
)
from resilient.engine.ground import providers
from resilient.surface.cli import providers as command
from resilient.surface.cli.providers import facts_of

NAMES = sorted(path.stem for path in (Path(__file__).parents[2] / "providers").glob("[a-z]*.py"))


def test_list(run):
    status, out, _ = run("providers", "list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == NAMES
    assert "5,000 per 1 h" in out
    status, out, _ = run("providers", "list", "--json")
    assert [one["name"] for one in json.loads(out)["providers"]] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_show(run, name):
    status, out, _ = run("providers", "show", name)
    assert status == 0
    made = providers_by_name()[name]()
    for text in (made.title, made.base_url, "Errors", "Read in", *made.sources, *made.unverified):
        assert text in out
    status, out, _ = run("providers", "show", name, "--json")
    assert json.loads(out)["name"] == made.name
    assert '"client_secret"' not in out


A = Provider(name="acme", title="Acme", base_url="https://api.acme.example")
OTHER = {
    "name": "acme2", "title": "Acme Two", "base_url": "https://api2.acme.example", "hosts": ("up.acme.example",),
    "limits": {"account": [Limit(7, per=60)]}, "concurrency": {"account": 3},
    "waits": WaitDialect(retry_after=Word.ISO8601), "errors": Errors(code=("oops",)), "idempotency": Idempotency(),
    "reads": ("POST /find",), "graphql": "/gql", "route": lambda _: ("", 1.0), "cost": lambda _: None,
    "exceptions": {"acme.Error": FailureKind.PERMANENT}, "auth": (ApiKey(),), "headers": {"X-Version": "3"},
    "pagination": {"list": LinkHeader(most=50)},
    "incremental": {"new": Incremental(style="key", query="after", field="id")},
    "webhook": Webhook(token="x-token"), "batch": BatchEndpoint(path="/many", most=9),
    "verified_on": date(2026, 1, 2), "sources": ("acme.example/docs",), "unverified": ("limits",),
    "private_hosts": ("acme.internal",), "single_account": True, "anonymous": True,
    "propagates_trace": True, "whoami": "GET /me",
}  # fmt: skip


@pytest.mark.parametrize("name", [one.name for one in fields(Provider) if one.init])
def test_every_fact_is_shown(run, monkeypatch, name):
    def shown(made):
        monkeypatch.setattr(providers, "providers_by_name", lambda: {"acme": lambda: made})
        status, out, _ = run("providers", "show", "acme")
        assert status == 0
        return out

    assert shown(replace(A, **{name: OTHER[name]})) != shown(A)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"batch": OTHER["batch"]}, "POST /many: up to 9 requests, in requests; answers in responses"),
        ({"auth": (ApiKey(query="key"),)}, "an API key, in the parameter key of the URL"),
        ({"auth": (Basic(user="mail", password="app password"),)}, "HTTP basic, of mail and app password"),
        ({"waits": OTHER["waits"]}, "Retry-After holds an HTTP date or a date and time"),
        ({"webhook": Webhook(token="t", answer_within=5, repeats=False)}, "it wants to be answered 200 within 5 s"),
        ({"exceptions": {"a.B": FailureKind.CONFLICT}}, "the SDK's a.B: somebody else was faster, read it again"),
        ({"webhook": providers_by_name()["matrix"]().webhook}, "the header authorization holds the secret itself"),
        (
            {"idempotency": providers_by_name()["matrix"]().idempotency},
            "the end of the path holds the key of PUT to */send/*/*, */redact/*/*, */sendToDevice/*/*; it is",
        ),
        ({"idempotency": Idempotency(lives_with="grant")}, "it is forgotten once the account is connected anew"),
        (
            {"webhook": providers_by_name()["hubspot"]().webhook},
            "the HMAC-SHA256 of the method, the address, the body and the time, in base64",
        ),
        ({"webhook": providers_by_name()["github"]().webhook}, "it is not signed, so the body decides"),
        (
            {"incremental": {"d": Incremental(style="token", query="c", cursor="c", source="last_page", life=86400)}},
            "a cursor lasts 1 d",
        ),
    ],
)
def test_what_it_says(run, monkeypatch, facts, line):
    monkeypatch.setattr(providers, "providers_by_name", lambda: {"acme": lambda: replace(A, **facts)})
    assert line in run("providers", "show", "acme")[1]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_is_for_people(name):
    """No templates, no words of the program's own, no names of its classes."""
    facts = dict(facts_of(providers_by_name()[name]()))
    lines = [line for head in ("Credentials", "Pages", "Changes", "Webhooks") for line in facts[head]]
    assert not [line for line in lines if re.search(r"\{(?:body|timestamp|url|form|id)\}|(?:body|item|query):\w", line)]
    words = {"NextCursor", "LinkHeader", "authorization_code", "hmac-sha256", "reset_cursor", "Cursor", "equal"}
    assert not [line for line in (*lines, *facts["Errors"]) if words & set(re.findall(r"[\w-]+", line))]


def test_the_apps_own_providers_and_how_it_configured_the_others(run, monkeypatch, tmp_path):
    (tmp_path / "own_facts.py").write_text(
        "from resilient import Limit, Provider, Resilient\n"
        "from providers import github\n"
        "acme = Provider(name='acme', title='Acme', base_url='https://api.acme.example')\n"
        "ours = github.provider(client_id='c', client_secret='s3cret', limits={'account': [Limit(7, per='1h')]})\n"
        "app = Resilient('sqlite://', providers=[acme, ours])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "one of your program's own needs --app" in run("providers", "show", "acme")[2]
    monkeypatch.setenv("RESILIENT_APP", "own_facts:app")
    assert "Acme (acme)" in run("providers", "show", "acme")[1]
    out = run("providers", "show", "github")[1]
    assert "account: 7 per 1 h" in out
    assert "s3cret" not in out + run("providers", "show", "github", "--json")[1]
    listed = run("providers", "list")[1]
    assert [line.split()[0] for line in listed.splitlines()[1:]] == sorted(["acme", *NAMES])


def test_old_facts_are_said_to_be_old(run, monkeypatch):
    warning = "read more than a year ago: compare it with what its sources say now"
    monkeypatch.setattr(command, "today", lambda: date(2026, 12, 1))
    assert warning not in run("providers", "list")[1]
    assert warning not in run("providers", "show", "github")[1]
    monkeypatch.setattr(command, "today", lambda: date(2028, 11, 1))
    assert run("providers", "list")[1].count(warning) == len(NAMES)
    assert f"Warning: {warning}" in run("providers", "show", "github")[1]


def test_show_what_does_not_exist(run):
    status, out, err = run("providers", "show", "nope")
    assert (status, out) == (3, "")
    assert "providers list" in err


@pytest.mark.parametrize("name", ["Acme", "a-b", "1a", "class", "a/b", "../a", ""])
def test_new_wants_a_name(run, tmp_path, name):
    status, _, err = run("providers", "new", name, "--into", tmp_path)
    assert status == 2
    assert "acme" in err
    assert list(tmp_path.iterdir()) == []


def test_new_overwrites_nothing(run, tmp_path):
    assert run("providers", "new", "acme", "--into", tmp_path)[0] == 0
    (tmp_path / "acme.py").write_text("mine")
    status, _, err = run("providers", "new", "acme", "--into", tmp_path)
    assert status == 2
    assert "--force" in err
    assert (tmp_path / "acme.py").read_text() == "mine"
    assert run("providers", "new", "acme", "--into", tmp_path, "--force")[0] == 0
    assert (tmp_path / "acme.py").read_text() != "mine"


def contract(directory):
    """Run the written test as its author would."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "test_acme_corp.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{directory}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"},
    )
    return done.returncode, done.stdout


def test_a_new_provider_passes_its_contract_once_it_is_filled_in(run, tmp_path):
    status, out, _ = run("providers", "new", "acme_corp", "--into", tmp_path)
    assert status == 0
    assert "pytest" in out
    code, output = contract(tmp_path)
    assert code == 1
    for missing in ("title: give its name", "verified_on: ", "sources: "):  # each of them, without -v
        assert re.search(f"^E +(AssertionError: )?{missing}", output, re.MULTILINE)
    path = tmp_path / "acme_corp.py"
    text = path.read_text()
    for empty, filled in (
        ('title=""', 'title="Acme"'),
        ("verified_on=None", "verified_on=date(2026, 11, 1)"),
        ("sources=()", 'sources=("docs.acme.example.com/api",)'),
    ):
        assert empty in text
        text = text.replace(empty, filled)
    path.write_text(text)
    assert contract(tmp_path)[0] == 0


def test_the_template_is_as_tidy_as_our_own(run, tmp_path):
    run("providers", "new", "acme_corp", "--into", tmp_path)
    root = Path(__file__).parents[2]
    ruff = [sys.executable, "-m", "ruff", "check", "--config", root / "pyproject.toml", "--select", "E,F,W,I,UP,B,D"]
    done = subprocess.run(
        [*ruff, "--ignore", "D203,D213,D401,I001,F401", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
