"""The demo's parts, each by itself: contacts, the provider's behaviour, the audit."""

import base64
import hashlib
import io
import itertools
import json
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from rich.console import Console
from standardwebhooks import Webhook

from resilient import SetupError
from resilient.surface.demo import accounts, run
from resilient.surface.demo.accounts import Plan, plan
from resilient.surface.demo.audit import MOST_INTO_OUTAGE, MOST_REFUSED, ON_THE_WIRE, Evidence, audit
from resilient.surface.demo.provider import DIALECTS, Dialect, Sink, Troubled, wait_headers
from resilient.surface.demo.screen import JobView, ResourceView, Snapshot, happened, screen
from resilient.testing import FakeClock

EXAMPLE = Path(__file__).parents[2] / "examples" / "data" / "contacts.csv"

# -- contacts ------------------------------------------------------------------------------------------------


def test_the_shipped_example_is_what_an_installed_package_makes_up(tmp_path):
    assert accounts.write(tmp_path / "c.csv").read_bytes() == EXAMPLE.read_bytes()


def test_a_file_is_given_or_shipped_or_made_up(tmp_path, monkeypatch):
    assert accounts.find(Path("mine.csv"), tmp_path) == Path("mine.csv")
    assert accounts.find(None, tmp_path) == EXAMPLE
    monkeypatch.setattr(accounts, "_CHECKOUT", tmp_path / "no checkout")
    assert len(accounts.read(accounts.find(None, tmp_path)).good) == 1000


def test_the_example_has_every_account_and_some_impossible_addresses():
    read = accounts.read(EXAMPLE)
    assert (len(read.good), read.bad) == (1000, [])
    assert {c.account for c in read.good} == set(accounts.STORIES)
    assert sum(not re.fullmatch(r".+@.+\..+", c.email) for c in read.good) == 12


def test_a_file_of_the_users_own_needs_only_names_and_addresses(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("Email,Name,Phone\na@b.c,Ann,1\nd@e.f,Dan,2\n")
    read = accounts.read(path)
    assert [(c.id, c.name, c.email, c.endpoint) for c in read.good] == [
        ("line-2", "Ann", "a@b.c", "contacts"),
        ("line-3", "Dan", "d@e.f", "contacts"),
    ]
    assert len({c.account for c in read.good}) == 2


def test_bad_lines_are_named_and_left_out(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "id,account,name,email\n"
        "1,acme,Ann,a@b.c\n"
        "2,acme,,b@b.c\n"
        "3,ac me,Cid,c@b.c\n"
        "1,acme,Dan,d@b.c\n"
        "5,acme,Eve\n"
        "6,acme,Fay,f@b.c,more\n"
    )
    read = accounts.read(path)
    assert [c.id for c in read.good] == ["1"]
    assert read.bad == [
        "line 3: no name",
        "line 4: account 'ac me' or endpoint 'contacts' has characters no key can have",
        "line 5: id '1' was already used in line 2",
        "line 6: fewer fields than columns",
        "line 7: more fields than columns",
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "line 1: no column email and no column name"),
        (b"name\nAnn\n", "line 1: no column email"),
        (b"name,email\n", "holds no contact"),
        (b"name,email\n,a@b.c\n", "line 2: no name"),
        (b"name,email\n\xff\xfe,a@b.c\n", "not a CSV file in UTF-8"),
    ],
)
def test_a_file_that_is_no_use_says_why(tmp_path, content, problem):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(SetupError, match=problem):
        accounts.read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SetupError, match=r"nowhere\.csv: No such file"):
        accounts.read(tmp_path / "nowhere.csv")


def test_troubles_fit_the_number_of_contacts():
    few = [(accounts.THROTTLED, "contacts")] * 10 + [(accounts.LIMITED, "leads")] * 4
    troubles = plan(few, wait=0.5)
    assert (troubles.burst, troubles.endpoint_burst, troubles.down_after, troubles.wait) == (1, 1, 0, 0.5)
    assert 180 / plan([(accounts.THROTTLED, "contacts")] * 180).burst > 5  # five waits, one per dialect


# -- waits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_tells_the_wait_it_keeps(dialect):
    now = 1_800_000_000.25
    until = dialect.until(now, 1.2)
    headers = wait_headers(dialect, until, now, 10)
    end = {
        Dialect.SECONDS: lambda: now + int(headers["retry-after"]),
        Dialect.DATE: lambda: parsedate_to_datetime(headers["retry-after"]).timestamp(),
        Dialect.MILLISECONDS: lambda: now + int(headers["retry-after-ms"]) / 1000,
        Dialect.RATELIMIT: lambda: now + int(headers["ratelimit"].rpartition("=")[2]),
        Dialect.EPOCH: lambda: float(headers["x-ratelimit-reset"]),
    }[dialect]()
    assert until >= now + 1.2
    assert until <= end < until + 0.002


# -- the provider --------------------------------------------------------------------------------------------


class Hand:
    """A provider in this process, its clock and its log."""

    def __init__(self, **changes):
        self.clock = FakeClock()
        self.downs = 0
        self.text = io.StringIO()
        defaults = {
            "burst": 2,
            "endpoint_burst": 1,
            "wait": 1.0,
            "down_after": 1,
            "unavailable_least": 2,
            "silent_after": 99,
            "revoke_after": 99,
            "outage_after": 99,
            "latency": 0.0,
        }
        self.provider = Troubled(Plan(**(defaults | changes)), self.text, self._down, clock=self.clock.now, port=False)
        self.client = httpx.AsyncClient(transport=self.provider.transport, base_url="http://localhost")

    def _down(self):
        self.downs += 1

    async def push(self, account, contact, *, endpoint="contacts", key=None, email="a@example.com"):
        headers = self.authorization(account) | ({"idempotency-key": key or contact} if key != "" else {})
        return await self.client.post(
            f"/v1/{account}/{endpoint}", json={"id": contact, "email": email}, headers=headers
        )

    def authorization(self, account):
        return {"authorization": f"Bearer {self.provider.account(account, lifetime=1000.0).access_token}"}

    async def people(self, account, after=""):
        query = {"after": after} if after else {}
        return await self.client.get(f"/v1/{account}/people", params=query, headers=self.authorization(account))

    async def token(self, **form):
        return await self.client.post("/oauth/token", data=form)

    async def consent(self, account="acme", verifier="v" * 43):
        """A code, as the owner's browser brings it."""
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "client_id": accounts.CLIENT_ID, "code_challenge_method": "S256", "code_challenge": challenge,
            "redirect_uri": CALLBACK, "state": "s", "account": account,
        }  # fmt: skip
        page = await self.client.get("/oauth/authorize", params=query)
        return httpx.URL(page.headers["location"]).params["code"]

    async def connect(self, account="acme"):
        """What the token endpoint answers after a consent."""
        code = await self.consent(account)
        form = {"grant_type": "authorization_code", "redirect_uri": CALLBACK, "code_verifier": "v" * 43}
        return (await self.token(**form, code=code)).json()

    def log(self):
        return [json.loads(line) for line in self.text.getvalue().splitlines()]


CALLBACK = "https://a.example/cb"


async def test_a_key_stores_once_and_is_recognised_again():
    hand = Hand()
    assert (await hand.push("acme", "c1", key="k")).status_code == 201
    assert (await hand.push("acme", "c1", key="k")).json() == {"contact": "c1"}
    assert (await hand.push("acme", "c1", key="")).status_code == 201
    assert [(e["decision"], e["key"]) for e in hand.log()] == [("stored", "k"), ("repeated", "k"), ("stored", None)]


async def test_an_impossible_address_is_refused_with_its_reason():
    hand = Hand()
    answer = await hand.push("acme", "c1", email="n/a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_email")
    assert [e["decision"] for e in hand.log()] == ["invalid"]


async def test_the_throttled_account_waits_and_who_comes_early_is_noted():
    hand = Hand()
    for n, expected in enumerate((201, 201, 429, 429)):
        assert (await hand.push(accounts.THROTTLED, f"c{n}")).status_code == expected
        hand.clock.advance(0.1)
    assert (await hand.push(accounts.THROTTLED, "c0")).status_code == 201  # out of its memory, and early all the same
    assert [(e.get("in_cooldown"), e.get("late")) for e in hand.log()[2:]] == [(None, None), (True, 0.1), (True, 0.2)]
    hand.clock.advance(1.0)
    assert (await hand.push(accounts.THROTTLED, "c2")).status_code == 201  # the key that was refused is good


async def test_each_wait_speaks_the_next_dialect():
    hand = Hand(burst=1)
    for n in range(12):
        if (await hand.push(accounts.THROTTLED, f"c{n}")).status_code == 429:
            hand.clock.advance(5)
    assert [e["dialect"] for e in hand.log() if "dialect" in e][:5] == [d.value for d in DIALECTS]


async def test_a_limited_endpoint_leaves_the_others_flowing():
    hand = Hand()
    assert (await hand.push(accounts.LIMITED, "c1", endpoint="leads")).status_code == 201
    refused = await hand.push(accounts.LIMITED, "c2", endpoint="leads")
    assert (refused.status_code, refused.json()["error"]["scope"]) == (429, "endpoint")
    assert (await hand.push(accounts.LIMITED, "c3")).status_code == 201


async def test_the_undeclared_limit_counts_every_kind_of_request():
    hand = Hand(allowed=3)
    await hand.connect(accounts.UNDECLARED)
    assert (await hand.people(accounts.UNDECLARED)).status_code == 200
    for n, expected in enumerate((201, 201, 429, 429)):
        answer = await hand.push(accounts.UNDECLARED, f"c{n}")
        assert (answer.status_code, answer.headers.get("retry-after")) == (expected, "1" if expected == 429 else None)
        hand.clock.advance(0.1)
    assert (await hand.people(accounts.UNDECLARED)).status_code == 429
    assert [e.get("late") for e in hand.log() if e["decision"] == "throttled"] == [None, 0.1, 0.2]
    assert (await hand.push("acme", "c9")).status_code == 201
    hand.clock.advance(0.81)
    assert (await hand.push(accounts.UNDECLARED, "c2")).status_code == 201


async def test_the_account_that_goes_down_says_503_and_then_the_port_is_to_close():
    hand = Hand()
    for expected in (201, 503, 503):
        assert (await hand.push(accounts.DOWN, "c1")).status_code == expected
    assert hand.downs == 1
    assert (await hand.push("acme", "c2")).status_code == 201
    hand.clock.advance(60)
    assert (await hand.push(accounts.DOWN, "c1")).status_code == 201
    assert [e["decision"] for e in hand.log()] == ["stored", "unavailable", "unavailable", "stored", "repeated"]


async def test_the_account_that_goes_down_says_503_so_often_that_its_circuit_opens_on_a_slow_machine_too():
    hand = Hand(unavailable_least=3)
    for expected in (201, 503, 503, 503, 201):
        assert (await hand.push(accounts.DOWN, "c1")).status_code == expected
        hand.clock.advance(60)
    assert hand.downs == 1


async def test_one_answer_never_comes_though_the_contact_is_stored():
    hand = Hand(silent_after=0)
    with pytest.raises(httpx.ReadTimeout):
        await hand.push(accounts.HEALTHY, "c1")
    assert (await hand.push(accounts.HEALTHY, "c1")).json() == {"contact": "c1"}
    assert (await hand.push(accounts.HEALTHY, "c2")).status_code == 201
    assert [e["decision"] for e in hand.log()] == ["stored", "repeated", "stored"]


async def test_the_whole_provider_is_out_for_a_while_and_issues_tokens():
    hand = Hand(outage_after=1, outage=2.0)
    assert (await hand.push("acme", "c1")).status_code == 201
    assert (await hand.push("other", "c2")).json()["error"]["code"] == "outage"
    assert (await hand.people("acme")).status_code == 503
    assert "access_token" in await hand.connect()
    hand.clock.advance(2.1)
    assert (await hand.push("other", "c2")).status_code == 201


async def test_records_come_page_by_page():
    hand, names, after = Hand(people=60), [], ""
    await hand.connect()
    while after is not None:
        page = (await hand.people("acme", after)).json()
        names += [one["id"] for one in page["people"]]
        after = page.get("next")
    assert names == [f"acme-{n}" for n in range(60)]
    assert [e["decision"] for e in hand.log()] == ["consented", "connected", *["listed"] * 3]


async def test_a_refresh_token_is_good_again_for_who_lost_the_answer():
    hand = Hand()
    first = await hand.connect()
    assert first["expires_in"] == hand.provider.plan.token_stated
    form = {"grant_type": "refresh_token", "refresh_token": first["refresh_token"]}
    second, again = (await hand.token(**form)).json(), (await hand.token(**form)).json()
    assert second["refresh_token"] == again["refresh_token"] != first["refresh_token"]
    assert (await hand.token(grant_type="refresh_token", refresh_token="made up")).status_code == 400
    assert [e["decision"] for e in hand.log()] == ["consented", "connected", "refreshed", "refreshed", "refused"]


async def test_access_tokens_end_earlier_than_they_say():
    hand = Hand(token_stated=6, token_life=4)
    headers = {"authorization": f"Bearer {(await hand.connect())['access_token']}"}
    assert (await hand.client.get("/v1/acme/people", headers=headers)).status_code == 200
    hand.clock.advance(4.1)
    assert (await hand.client.get("/v1/acme/people", headers=headers)).status_code == 401


async def test_the_account_with_a_rate_keeps_its_tokens():
    hand = Hand(token_stated=6, token_life=4)
    token = (await hand.connect(accounts.UNDECLARED))["access_token"]
    hand.clock.advance(30)
    page = await hand.client.get(f"/v1/{accounts.UNDECLARED}/people", headers={"authorization": f"Bearer {token}"})
    assert page.status_code == 200


async def test_an_owner_takes_the_access_back():
    hand = Hand(revoke_after=1)
    tokens = await hand.connect(accounts.REVOKED)
    assert (await hand.push(accounts.REVOKED, "c1")).status_code == 201
    assert (await hand.push(accounts.REVOKED, "c2")).status_code == 401
    refresh = {"grant_type": "refresh_token", "refresh_token": tokens["refresh_token"]}
    assert (await hand.token(**refresh)).status_code == 400
    await hand.connect(accounts.REVOKED)
    assert (await hand.push(accounts.REVOKED, "c2")).status_code == 201
    assert [e["decision"] for e in hand.log() if e["decision"] in ("connected", "revoked")] == [
        "connected", "revoked", "connected",
    ]  # fmt: skip


async def test_the_webhook_takes_what_is_signed_and_goes_away_once():
    log, away, secret = [], [], "whsec_" + base64.b64encode(b"s" * 32).decode()
    sink = Sink(secret, log.append, 2, lambda: away.append(len(log)), port=False)
    client = httpx.AsyncClient(transport=sink.transport, base_url="http://localhost")
    for number in (1, 2, 3):
        event = {"id": f"e{number}", "partitionkey": "acme", "sequence": f"{number:020}", "data": {"contact": "c1"}}
        body, at = json.dumps(event), datetime.now(UTC)
        headers = {
            "webhook-id": f"e{number}", "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": Webhook(secret).sign(f"e{number}", at, body),
        }  # fmt: skip
        assert (await client.post("/events", content=body, headers=headers)).status_code == 202
        assert (await client.post("/events", content=body + " ", headers=headers)).status_code == 401
    assert [(e["decision"], e.get("number")) for e in log] == [
        ("event", 1), ("forged", None), ("event", 2), ("forged", None), ("event", 3), ("forged", None),
    ]  # fmt: skip
    assert away == [3]


# -- the screen ----------------------------------------------------------------------------------------------


NOW = datetime(2030, 1, 1, tzinfo=UTC)
GATES = {
    "crm/acme": ResourceView("crm/acme"),
    "crm/globex": ResourceView("crm/globex", blocked_until=NOW + timedelta(seconds=2.1)),
    "crm/initech": ResourceView("crm/initech", "open", open_until=NOW + timedelta(seconds=0.7)),
    "crm/umbrella/leads": ResourceView("crm/umbrella/leads", "half_open"),
    "crm/hooli": ResourceView("crm/hooli", auth="needs_reauth"),
    "crm/vandelay": ResourceView("crm/vandelay", learnt={"kind": "rate", "rate": 4.8, "throttles": 2}),
}
LOOK = Snapshot(
    NOW, GATES, {key: Counter(ready=30, scheduled=4, running=2, succeeded=63, dead=1) for key in GATES},
    {"host:1:a": 10}, 0,
)  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_live_screen_shows_each_accounts_gate_backlog_and_progress(width):
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=width, color_system=None)
    with screen(terminal, plain=False) as live:
        live.say("too early for a picture")
        live.show(LOOK)
        live.say("crm/globex said: come back later")
    shown = [line.rstrip() for line in text.getvalue().splitlines()]
    assert max(map(len, shown[-8:])) <= width
    rows = {line.split()[0]: re.split(r" {2,}", line)[1:] for line in shown if line.startswith("crm/")}
    story = {"crm/globex": ["throttled: 429 in five dialects"]} if width == 140 else {}
    assert rows["crm/globex"] == ["told to wait 2.1 s", *story.get("crm/globex", ()), "34", "2", "63", "1"]
    assert {key: row[0] for key, row in rows.items() if key in GATES} == {
        "crm/acme": "flows",
        "crm/globex": "told to wait 2.1 s",
        "crm/initech": "open, tries again in 0.7 s",
        "crm/umbrella/leads": "half open: one job tries",
        "crm/hooli": "must be connected again",
        "crm/vandelay": "flows, learnt 4.8/s",
    }
    assert all(row[-4:] == ["34", "2", "63", "1"] for key, row in rows.items() if key in GATES)
    assert any("384 of 600 done, 12 running on 1 workers" in line for line in shown)
    assert any("crm/globex said: come back later" in line for line in shown)


def test_where_no_terminal_is_it_shows_lines():
    text = io.StringIO()
    with screen(Console(file=text, width=200), plain=False) as lines:
        lines.show(LOOK)
        lines.show(LOOK)  # too soon after it
    (line,) = text.getvalue().splitlines()
    assert "384 of 600 done; waiting: crm/acme 34, crm/globex 34, " in line


def test_what_was_over_between_two_looks_is_told():
    """A machine that stands still for a moment does not make the story another."""
    key, past = "crm/initech", NOW - timedelta(seconds=1)

    def told(before, after):
        return list(happened(*(Snapshot(NOW, {key: ResourceView(key, **view)}, {}, {}, 0) for view in (before, after))))

    opened = f"{key}: circuit opened"
    assert told({}, {"generation": 3}) == [opened, f"{key} is well again: circuit closed"]
    assert told({}, {"breaker": "half_open", "generation": 2}) == [
        opened,
        f"{key}: one job tries whether it is well again",
    ]
    assert told({"generation": 3}, {"generation": 3}) == []
    cooled = {"blocked_until": past, "blocked_code": "http_429"}
    assert told({}, cooled) == [f"{key} said: come back later (http_429); every worker waited"]
    assert told(cooled, cooled) == []


def test_what_refusals_taught_is_said_once_for_each_throttle():
    def look(learnt):
        return Snapshot(NOW, {"crm/vandelay": ResourceView("crm/vandelay", learnt=learnt)}, {}, {}, 0)

    looks = [
        look(None),
        look({"throttles": 1}),
        look({"kind": "rate", "rate": 4.75, "throttles": 2}),
        look({"kind": "rate", "rate": 5.0, "throttles": 2}),
        look({"kind": "rate", "rate": 4.6, "throttles": 3}),
    ]
    lines = [list(happened(before, after)) for before, after in itertools.pairwise(looks)]
    said = "crm/vandelay: nobody declared its limit; learnt"
    assert lines == [[], [f"{said} 4.8/s from 2 throttles"], [], [f"{said} 4.6/s from 3 throttles"]]


# -- the audit -----------------------------------------------------------------------------------------------


def entry(contact, decision="stored", **more):
    return {
        "contact": contact,
        "account": "acme",
        "endpoint": "contacts",
        "key": contact,
        "decision": decision,
    } | more


def event(number, contact, **more):
    return {"decision": "event", "id": f"e-{contact}", "account": "acme", "number": number, "about": contact} | more


GOOD_LOG = [
    event(1, "c1"),
    event(2, "c2"),
    event(1, "c1"),  # came again
    entry("c1"),
    entry("c2", "throttled", dialect="retry-after-ms"),
    entry("c2", "throttled", dialect="retry-after-ms", in_cooldown=True, late=ON_THE_WIRE),
    entry("c2"),
    entry("c2", "repeated"),
    entry("c3", "invalid"),
]
GOOD_JOBS = [
    JobView("c1", "succeeded", None, 0),
    JobView("c2", "succeeded", None, 1),
    JobView("c3", "dead", "422 invalid_email", 0),
]


GOOD = {
    "log": GOOD_LOG, "jobs": GOOD_JOBS, "contacts": ("c1", "c2", "c3"), "records": ("r1", "r2"),
    "expected": ("r1", "r2"), "pushed": ("c1", "c2"),
}  # fmt: skip


def judge(**changes):
    return audit(Evidence(**GOOD | changes))


def broken(log=(), **evidence):
    """Which claims are false, by their number."""
    verdict = judge(log=[*GOOD_LOG, *log], **evidence)
    return [n for n, claim in enumerate(verdict.claims) if not claim.holds]


def test_a_good_run_passes():
    verdict = judge()
    assert verdict.passed
    assert verdict.dead == (("c3", "422 invalid_email"),)
    assert "1 more were on the wire" in verdict.claims[2].result


DELIVERED, DUPLICATES, COOLDOWN, DEAD, LOST, WAITING, READ, GRANTS, OUTAGE, NOTED, EVENTS, ORDER, BEYOND = range(13)
REFUSED = {"account": accounts.UNDECLARED, "endpoint": "contacts", "decision": "throttled"}
CONNECTED, REVOKED = ({"account": "acme", "decision": what} for what in ("connected", "revoked"))


@pytest.mark.parametrize(
    ("change", "claims"),
    [
        ({"contacts": ("c1", "c2", "c3", "c4")}, [DELIVERED, LOST]),
        ({"log": [entry("c1", key="another")]}, [DELIVERED, DUPLICATES]),
        ({"log": [entry("c2", "throttled", in_cooldown=True, late=ON_THE_WIRE + 0.01)]}, [COOLDOWN]),
        ({"log": [entry("c1", "invalid")]}, [DEAD]),
        ({"jobs": [*GOOD_JOBS[:2], JobView("c3", "dead", None, 0)]}, [DEAD]),
        ({"jobs": [JobView("c1", "dead", "why not", 0), *GOOD_JOBS[1:]]}, [DEAD, LOST]),
        ({"jobs": [JobView("c1", "running", None, 0), *GOOD_JOBS[1:]]}, [LOST]),
        ({"jobs": GOOD_JOBS[1:]}, [LOST]),
        ({"jobs": [*GOOD_JOBS[:2], JobView("c3", "succeeded", None, 0)]}, [DEAD, LOST]),
        ({"jobs": [JobView("c1", "succeeded", None, 0, charged_waits=1), *GOOD_JOBS[1:]]}, [WAITING]),
        ({"pushed": ("c1",)}, [NOTED, EVENTS]),
        ({"pushed": ("c1", "c2", "c2")}, [NOTED]),
        ({"log": [event(3, "c4")]}, [EVENTS]),
        ({"log": [event(4, "c1")]}, [ORDER]),
        ({"records": ("r1",)}, [READ]),
        ({"records": ("r1", "r2", "r2")}, [READ]),
        ({"records": ("r1", "r2", "r3")}, [READ]),
        ({"log": [CONNECTED, CONNECTED]}, [GRANTS]),
        ({"log": [CONNECTED, REVOKED]}, [GRANTS]),
        ({"log": [CONNECTED, REVOKED, CONNECTED]}, []),
        ({"log": [{"account": "acme", "decision": "outage"}] * MOST_INTO_OUTAGE}, []),
        ({"log": [{"account": "acme", "decision": "outage"}] * (MOST_INTO_OUTAGE + 1)}, [OUTAGE]),
        ({"log": [REFUSED] * MOST_REFUSED, "learnt": 10.0}, []),
        ({"log": [REFUSED] * (MOST_REFUSED + 1)}, [BEYOND]),
        ({"learnt": 10.1}, [BEYOND]),
    ],
)
def test_each_claim_can_be_false(change, claims):
    assert broken(**change) == claims


def test_culprits_are_named():
    verdict = judge(log=[*GOOD_LOG, entry("c1", key="another")])
    assert verdict.claims[DUPLICATES].result == "1; stored twice: c1"


def test_a_run_of_nothing_does_not_pass():
    assert not judge(log=[], jobs=[], contacts=[], records=[], expected=[], pushed=[]).passed


def test_a_run_in_which_everything_is_refused_passes():
    assert judge(log=GOOD_LOG[-1:], jobs=GOOD_JOBS[-1:], contacts=["c3"], pushed=()).passed


def test_a_slow_machine_is_waited_for_as_long_as_jobs_end(monkeypatch):
    clock, ended, lines = [0.0], iter([0, 1, 1, 2, 3, 3, 3, 3, 3]), []
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run.time, "sleep", lambda _: clock.append(clock.pop() + 50))
    monkeypatch.setattr(run, "happened", lambda *_: ())

    def look(_):
        return SimpleNamespace(finished=next(ended), jobs=100, running={})

    app, display = SimpleNamespace(database=SimpleNamespace(transaction_sync=look)), Mock(say=lines.append)
    run._watch(app, Mock(), display, run.Options(workers=0, limit=120), Mock())
    assert lines == ["not finished, and no job has ended for 120 s; judged as it stands"]
    assert clock == [350.0]  # the third ended at 200
