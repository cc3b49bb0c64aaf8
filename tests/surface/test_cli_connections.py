"""``resilient connections`` and ``resilient secrets``: what they do, and that they show no secret."""

from __future__ import annotations

import io
import json

import pytest

from resilient import Provider, Resilient
from resilient.store.accounts import fuse, grants
from resilient.store.accounts.secrets import new_key
from resilient.store.gates import controls as gates
from resilient.surface.cli import main
from resilient.testing import FakeProvider

KEY = new_key()
PROGRAM = """
from resilient import Bearer, ApiKey, Provider, Resilient
app = Resilient({url!r}, providers=[Provider(name="acme", base_url="https://acme.example", auth=(Bearer(), ApiKey()))])
"""


@pytest.fixture
def run(sqlite_url, tmp_path, monkeypatch, capsys):
    (tmp_path / "shop_connections.py").write_text(PROGRAM.format(url=sqlite_url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RESILIENT_APP", "shop_connections:app")
    monkeypatch.setenv("RESILIENT_SECRETS", KEY)

    def run_(*arguments, typed=None):
        monkeypatch.delitem(__import__("sys").modules, "shop_connections", raising=False)
        if typed is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = main(list(arguments))
        printed = capsys.readouterr()
        assert "canary" not in printed.out + printed.err
        assert KEY not in printed.out + printed.err
        return status, printed.out, printed.err

    return run_


def test_add_list_show_test_revoke(run):
    assert run("connections", "add", "acme/a", typed="canary-token\n")[0] == 0
    status, out, _ = run("connections", "list", "acme", "--json")
    assert status == 0
    (one,) = json.loads(out)["connections"]
    assert (one["resource_key"], one["kind"], one["state"]) == ("acme/a", "bearer", "active")
    assert "active" in run("connections", "show", "acme/a")[1]
    assert "acme/a is well" in run("connections", "test", "acme/a")[1]
    status, _, err = run("connections", "revoke", "acme/a")
    assert (status, err) == (1, "error: Forget the credentials of acme/a? Say --yes to do it.\n")
    assert run("connections", "revoke", "acme/a", "--yes")[0] == 0
    assert "revoked" in run("connections", "list", "--state", "revoked")[1]
    assert run("connections", "test", "acme/a")[0] == 1


def test_suspects_are_released_or_confirmed(run, sqlite_url):
    app = Resilient(sqlite_url, secrets=[KEY])

    def blow():
        for number in range(6):
            assert run("connections", "add", f"acme/{number}", typed="canary-token\n")[0] == 0
        for one in app.sync.connections.list("acme"):
            app.database.transaction_sync(_refuse, one.grant_id, app.grants.fuse)

    blow()
    assert "suspect_auth" in run("status")[1]
    assert "suspect" in run("connections", "list")[1]
    assert json.loads(run("connections", "release", "acme", "--json", "--yes")[1]) == {"release": 6}
    assert run("connections", "list", "--state", "suspect", "--json")[1].count("resource_key") == 0
    blow()
    assert "6 grants of acme: confirmed" in run("connections", "confirm", "acme", "--yes")[1]
    assert run("connections", "list", "--state", "needs_reauth", "--json")[1].count("resource_key") == 6
    assert "suspect_auth" not in run("status")[1]


def _refuse(c, d, grant_id, role):
    grants.note_worked(c, d, grant_id, grants.read(c, d, grant_id).version)
    fuse.die_if_version(c, d, grants.read(c, d, grant_id), "revoked", role)


def test_a_provider_that_does_not_exist_has_no_suspects(run):
    for verb in ("release", "confirm"):
        status, _, err = run("connections", verb, "nosuch", "--yes")
        assert (status, err) == (3, "error: there is no provider 'nosuch': there are acme\n")
    assert run("connections", "release", "acme", "--yes")[0] == 0


def test_a_dead_grant_is_no_job_that_waits(run, sqlite_url):
    run("connections", "add", "acme/a", typed="canary-token\n")
    app = Resilient(sqlite_url, secrets=[KEY])
    (one,) = app.sync.connections.list("acme")
    app.database.transaction_sync(_refuse, one.grant_id, app.grants.fuse)
    status, _, err = run("connections", "test", "acme/a")
    assert status == 1
    assert "job" not in err
    text = " ".join(err.split())
    assert "acme/a lacks valid credentials (needs_reauth) since" in text
    assert "its account must be connected again. `resilient connect acme acme/a`, or `resilient" in text


@pytest.mark.parametrize(
    ("key", "code", "end", "remedy"),
    [
        ("acme/a", "unreadable", "with its key", "give them all keys in RESILIENT_SECRETS"),
        ("acme", "app_refused", "with its secret", "check its client_id and client_secret"),
        ("acme", "suspect_auth", "by a probe", "a probe decides, or `resilient connections release`"),
        ("acme/a", "needs_reauth", "on reconnect", ""),
    ],
)
def test_what_ends_a_gate_of_credentials_is_said_by_its_code(run, sqlite_url, key, code, end, remedy):
    run("connections", "add", "acme/a", typed="canary-token\n")
    app = Resilient(sqlite_url, secrets=[KEY])
    app.database.transaction_sync(gates.set_auth, key, code)
    for command in (["resources", "list", "--gate", "auth"], ["status"]):
        text = " ".join(run(*command)[1].split())
        is_named = code != "needs_reauth" or "status" in command
        assert (code in text, end in text, remedy in text) == (is_named, True, True)
        assert end == "on reconnect" or "on reconnect" not in text
    listed = run("connections", "list")[1]
    assert (code in listed) is (code == "unreadable")
    assert f"gate of {key}" in run("connections", "show", "acme/a")[1]
    shown = json.loads(run("connections", "list", "--json")[1])["connections"][0]
    assert shown["gate"] == (code if key == "acme/a" else None)


def test_unknown_and_wrong(run):
    assert run("connections", "show", "acme/none")[0] == 3
    assert run("connections", "add", "acme/a", typed="\n")[0] == 2
    assert run("connections", "add", "acme/a", "--kind", "magic", typed="x\n")[0] == 2
    assert run("connections", "add", "nobody/a", typed="canary\n")[0] == 2


def test_without_a_key_it_says_how_to_make_one(run, monkeypatch):
    monkeypatch.delenv("RESILIENT_SECRETS")
    status, _, err = run("connections", "add", "acme/a", typed="canary\n")
    assert status == 2
    assert "resilient secrets new" in err


def test_a_new_key_and_rotation(run, monkeypatch):
    run("connections", "add", "acme/a", typed="canary-token\n")
    _, made, remark = run("secrets", "new")
    made = made.strip()
    assert remark.startswith("The first key: set RESILIENT_SECRETS to it in every process")
    steps = ["give it as the last", "put it in front", "`resilient secrets rotate`", "take the old one away"]
    assert [one for one in steps if one in " ".join(remark.split())] == steps
    monkeypatch.setenv("RESILIENT_SECRETS", f"{made},{KEY}")
    assert "1 grant" in run("secrets", "rotate")[1]
    monkeypatch.setenv("RESILIENT_SECRETS", made)
    assert run("connections", "test", "acme/a")[0] == 0


def test_a_broken_key_is_not_shown(sqlite_url):
    with pytest.raises(Exception, match="key 1 of the secrets is no key") as raised:
        Resilient(sqlite_url, secrets=["canary-no-key"])
    assert "canary" not in str(raised.value)


FREE = """
from resilient import Provider, Resilient
app = Resilient({url!r}, providers=[Provider(name="free", base_url={at!r}, anonymous=True, whoami="GET /me")])
"""


def test_a_test_request_says_how_it_was_answered(run, sqlite_url, tmp_path):
    with FakeProvider(Provider(name="free", base_url="https://free.example"), anonymous=True) as fake:
        fake.on("GET /me", {"id": 1})
        (tmp_path / "shop_connections.py").write_text(FREE.format(url=sqlite_url, at=fake.url))
        status, out, _ = run("resources", "test", "free/a")
        assert (status, out.startswith("GET /me through free/a: answered 200 in ")) == (0, True)
        assert "credentials none needed" in " ".join(run("resources", "show", "free/a")[1].split())
        fake.fail_next(404)
        status, out, _ = run("resources", "test", "free/a", "--json")
        answer = json.loads(out)
        assert (status, answer["status"], answer["failure"]) == (1, 404, "permanent")
        run("resources", "pause", "free/a")
        status, _, err = run("resources", "test", "free/a")
        assert (status, "free/a' is stopped by its pause; no test request was sent" in err) == (1, True)
        changes = json.loads(run("audit", "--json")[1])["changes"]
    assert [one["action"] for one in changes] == [
        "resources test",
        "resources pause",
        "resources test",
        "resources test",
    ]
    assert {one["via"] for one in changes} == {"command line"}
    assert len(fake.log.api) == 2
