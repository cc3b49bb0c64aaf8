"""What is found, by pure rules, and how it reads."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.alerts import rules as alerts
from resilient.core.alerts import words
from resilient.core.alerts.rules import AlertInfo, Alerting, Finding
from resilient.core.alerts.words import Size, notice
from resilient.core.base.errors import FailureKind, InvalidInput
from resilient.core.schedules.cron import ticks

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
CALM = {
    "key": "github/a", "breaker": "closed", "open_until": None, "opened_at": None, "blocked_until": None,
    "blocked_since": None, "blocked_code": None, "auth": "ok", "auth_since": None, "last_error": None,
    "last_error_code": None,
}  # fmt: skip


class TestAlerting:
    def test_spans_in_every_notation(self):
        config = Alerting(repeat="30m", backlog=60, throttled=None)
        assert config.span("repeat") == timedelta(minutes=30)
        assert config.span("backlog") == timedelta(minutes=1)
        assert config.throttled is None

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"repeat": "now and then"}, "repeat='now and then' is not a span"),
            ({"settle": None}, r"Alerting\(settle=None\)"),
            ({"failure_rate": 1.5}, r"failure_rate=1.5"),
            ({"failure_volume": 0}, "failure_volume and periods are at least 1"),
            ({"periods": 0}, "failure_volume and periods are at least 1"),
            ({"off": {"noise"}}, "there is no alert 'noise' to switch off: backlog, "),
            ({"sinks": ["ftp://x"]}, "a sink of alerts is a function of one notice, or a URL"),
            ({"sinks": ["https://discord.com/api/webhooks/1/s3cret"]}, "write /slack behind its URL"),
            ({"sinks": ["https://ptb.discord.com/api/v10/webhooks/1/s3cret/"]}, "write /slack behind its URL"),
            ({"sinks": ["https://discordapp.com/api/webhooks/1/s3cret/github"]}, "write /slack behind its URL"),
        ],
    )
    def test_mistakes(self, given, words):
        with pytest.raises(InvalidInput, match=words):
            Alerting(**given)

    def test_a_webhook_of_discord_takes_notices_in_slacks_form(self):
        good = ["https://discord.com/api/webhooks/1/s3cret/slack", "https://discord.example/api/webhooks/1/s3cret"]
        assert list(Alerting(sinks=good).sinks) == good
        with pytest.raises(InvalidInput) as refused:
            Alerting(sinks=["https://discord.com/api/webhooks/1/s3cret"])
        assert "s3cret" not in str(refused.value)

    def test_a_webhook_is_a_secret(self):
        assert "s3cret" not in repr(Alerting(sinks=["https://hooks.example.com/s3cret"]))
        with pytest.raises(InvalidInput) as refused:
            Alerting(sinks=["hooks.example.com/s3cret"])
        assert "s3cret" not in str(refused.value)


class TestEnded:
    @pytest.mark.parametrize(
        ("decision", "kind", "name"),
        [
            ("retry", FailureKind.TRANSIENT, "new_error"),
            ("retry", FailureKind.BUG, "new_error"),
            ("reconcile", FailureKind.AMBIGUOUS, "new_error"),
            ("dead", FailureKind.PERMANENT, "dead"),
            ("dead", FailureKind.TRANSIENT, "dead"),
            ("defer", FailureKind.THROTTLED, None),
            ("defer", None, None),
            ("reset_cursor", FailureKind.RESET_CURSOR, None),
            ("slice", FailureKind.TIMEOUT, None),
            ("snooze", None, None),
            ("handed_back", None, None),
            ("cancelled", FailureKind.TRANSIENT, None),
            ("expired", FailureKind.EXPIRED, None),
            ("once_more", None, None),
        ],
    )
    def test_which_ends_alarm(self, decision, kind, name):
        assert alerts.alarming(decision, kind) == name

    def test_one_alert_for_a_kind_and_code(self):
        def fingerprint(name="dead", kind="mail", error="transient", code="http_503", **over):
            rest = {"error": "x", "resource": "a/1", "job": "1", **over}
            return alerts.ended(name, kind, error, code, **rest).fingerprint

        same = fingerprint()
        assert fingerprint(error="transient", resource="b/2", job="2") == same
        others = {fingerprint(name="new_error"), fingerprint(kind="sync"), fingerprint(code="http_500")}
        others |= {fingerprint(error="bug"), fingerprint(code=None)}
        assert len(others | {same}) == 6

    @pytest.mark.parametrize(
        ("code", "told"),
        [
            ("http_503", "http_503"),
            ("20003", "20003"),
            (None, ""),
            ("rate_limited", "rate_limited"),
            ("missing_0190b4d0-5a5b-7c3e-9a3e-5f1d2c3b4a59", "missing_#"),
            ("order 123456789 unknown", "order # unknown"),
            ("x" * 999, "x" * 64),
        ],
    )
    def test_ids_in_codes_are_not_news(self, code, told):
        assert alerts.code_of(code) == told

    def test_an_error_is_one_short_line(self):
        found = alerts.ended("dead", "k", "bug", "", error="boom " * 200 + "\nsecond", resource="a", job="1")
        assert len(found.detail["error"]) <= 300
        assert "second" not in found.detail["error"]


class TestResources:
    def of(self, **over):
        return [f.name for f in alerts.of_resource({**CALM, **over}, NOON, timedelta(days=1))]

    def test_one_that_is_well(self):
        assert self.of() == []
        assert self.of(blocked_until=NOON + HOUR) == []
        assert self.of(breaker="isolated") == []  # an operator's own doing

    def test_what_can_be_wrong(self):
        assert self.of(breaker="open", opened_at=NOON) == ["circuit_open"]
        assert self.of(breaker="half_open", opened_at=NOON) == ["circuit_open"]
        assert self.of(auth="needs_reauth", auth_since=NOON) == ["needs_reauth"]
        assert self.of(blocked_until=NOON + timedelta(days=2)) == ["long_throttle"]
        assert self.of(breaker="open", auth="suspect_auth") == ["circuit_open", "needs_reauth"]

    def test_the_rule_for_long_waits_can_be_off(self):
        row = {**CALM, "blocked_until": NOON + timedelta(days=900)}
        assert alerts.of_resource(row, NOON, None) == []


class TestBacklog:
    def test_the_longest_wait_of_each_provider(self):
        waiting = [
            ("github/a", "1", NOON - HOUR),
            ("github/b", "2", NOON - 2 * HOUR),
            ("jira/a", "3", NOON - timedelta(minutes=5)),
        ]
        (found,) = alerts.of_backlog(waiting, NOON, timedelta(minutes=30))
        assert (found.subject, found.detail["job"], found.detail["resource"]) == ("github", "2", "github/b")


class TestFailureRate:
    def found(self, ok, failed, volume=4):
        return {(f.parts[0], f.subject) for f in alerts.of_executions(ok, failed, 0.5, volume)}

    def test_a_kind_that_mostly_fails(self):
        keys = [f"github/{n}" for n in range(10)]
        assert self.found([("sync", k) for k in keys[:4]], [("sync", k) for k in keys]) == {("kind", "sync")}

    def test_an_account_that_mostly_fails_at_any_endpoint(self):
        ok = [("sync", "github/b")] * 9
        failed = [("sync", "github/a/search")] * 2 + [("push", "github/a")] * 2
        assert self.found(ok, failed) == {("resource", "github/a")}

    def test_few_executions_say_nothing(self):
        assert self.found([], [("sync", "github/a")] * 3) == set()

    def test_exactly_at_the_rate(self):
        assert ("kind", "sync") in self.found([("sync", "a/1")] * 2, [("sync", "a/2")] * 2)


class TestSilence:
    def silent(self, now, succeeded_at=None, periods=3, since=NOON):
        return alerts.of_schedule("s", ticks(every="1h"), since, succeeded_at, now, periods) is not None

    def test_n_ticks_had_their_whole_period(self):
        assert not self.silent(NOON + 4 * HOUR - timedelta(seconds=1))
        assert self.silent(NOON + 4 * HOUR)
        assert self.silent(NOON + 2 * HOUR, periods=1)
        assert not self.silent(NOON + HOUR, periods=1)

    def test_a_success_starts_it_anew(self):
        succeeded_at = NOON + 3 * HOUR + timedelta(minutes=2)
        assert not self.silent(NOON + 6 * HOUR, succeeded_at)
        assert self.silent(NOON + 7 * HOUR, succeeded_at)

    def test_the_time_before_it_was_resumed_does_not_count(self):
        assert not self.silent(NOON + 3 * HOUR, NOON - 900 * HOUR)

    def test_with_a_calendar(self):
        weekly = ticks(cron="0 3 * * mon", zone="Europe/Berlin")
        first = datetime(2030, 1, 7, 2, tzinfo=UTC)
        found = [
            alerts.of_schedule("s", weekly, NOON, None, first + timedelta(days=days), 2) is not None
            for days in (7, 13, 14, 15)
        ]
        assert found == [False, False, True, True]


def info(finding, **over):
    return AlertInfo(
        **{
            "fingerprint": finding.fingerprint, "name": finding.name, "subject": finding.subject,
            "detail": finding.detail, "count": finding.count, "cause": finding.cause,
            "first_at": NOON - HOUR, "last_at": NOON, **over,
        }
    )  # fmt: skip


DOWN = "the database postgresql://u:***@h/x does not answer: connection refused"


def every_finding():
    since = (NOON - HOUR).isoformat()
    error = {"error": "503 Service Unavailable", "error_code": "http_503"}
    yield alerts.ended("new_error", "sync", "transient", "http_503", error="no", resource="github/a", job="17")
    yield alerts.ended("dead", "sync", "bug", None, error="KeyError: 'x'", resource="github/a", job="17")
    yield alerts.swept("mail", "expired", 3, "17")
    yield alerts.repaired(2)
    yield alerts.repaired(3, "workflows")
    yield Finding("circuit_open", "github", {"since": since, "until": (NOON + HOUR).isoformat(), **error})
    yield Finding("long_throttle", "github/a", {"until": (NOON + 99 * HOUR).isoformat(), "code": "abuse"})
    yield Finding("needs_reauth", "github/a", {"auth": "needs_reauth", "since": since})
    yield Finding("needs_reauth", "github", {"auth": "invalid_client", "since": None})
    yield Finding("failure_rate", "sync", {"of": "kind", "failed": 30, "executions": 40}, ("kind",))
    yield Finding("backlog", "github", {"resource": "github/a", "job": "17", "since": since})
    yield alerts.of_stuck_handlers("sync", 2, "17", "github/a", NOON - HOUR)
    yield alerts.of_database("postgresql://u:***@h/x", NOON - HOUR, "h:1:ab", DOWN)
    yield Finding("no_success", "s", {"since": since, "ever": False, "periods": 3})
    yield alerts.stuck("order", "17")
    yield alerts.of_accounts("each", 7, "github/a", NOON - HOUR, ever=True, periods=3)
    yield alerts.of_stream("issues", 7, "github/a", NOON - HOUR, ever=True, periods=3)
    yield alerts.of_stream("issues", 1, "github/a", NOON - HOUR, ever=False, periods=3)


class TestWords:
    def test_every_alert_reads_as_a_line(self):
        texts = [notice("new", info(f), NOON).text for f in every_finding()]
        assert texts == [
            "sync: fails with transient http_503 on github/a (job 17): no",
            "sync: a job is dead, bug (job 17): KeyError: 'x'",
            "mail: 3 jobs are dead, expired (job 17)",
            (
                "turns: 2 resources with ready jobs fell out of the line for the workers, and went on by repair."
                " This is a bug: please report it"
            ),
            "workflows: 3 workflows stood still and went on by repair. This is a bug: please report it",
            (
                "github: its circuit is open since 11:00:00 UTC until 13:00:00 UTC (in 1 h), its jobs wait:"
                " 503 Service Unavailable"
            ),
            (
                "github/a: the provider asked to wait until 2030-01-05 15:00:00 UTC (in 4 d 3 h) (abuse);"
                " if that cannot be meant, reset the resource"
            ),
            "github/a: the account must be connected again since 11:00:00 UTC; until then its jobs wait",
            "github: its credentials are invalid_client; its jobs wait",
            "sync: 75% of its last 40 executions failed",
            (
                "github: job 17 on github/a is ready for 1 h and nothing stops it:"
                " workers are missing, too slow, or do not know its kind"
            ),
            (
                "sync: 2 handlers of it do not end after its time (job 17 on github/a since 11:00:00 UTC): until then"
                " the job stays running and counts against caps; if it hangs for good, restart that worker"
            ),
            (
                "postgresql://u:***@h/x: the engine's database does not answer worker h:1:ab since 11:00:00 UTC: no job"
                " begins, and results are kept until it does: connection refused"
            ),
            "s: no job of it succeeded since 11:00:00 UTC (1 h ago); 3 ticks in a row brought no success",
            (
                "order: workflow 17 cannot be undone, an undo of it is dead: see `resilient workflows show 17`, then"
                " retry or discard that job"
            ),
            (
                "each: 7 accounts had no success for 3 ticks in a row; github/a's last job succeeded at"
                " 11:00:00 UTC (1 h ago)"
            ),
            (
                "issues: no pass of this stream ended in time for 7 accounts, 3 times as long as expected; the last one"
                " of github/a ended at 11:00:00 UTC (1 h ago)"
            ),
            (
                "issues: no pass of this stream ended in time for 1 account, 3 times as long as expected; none ever of"
                " github/a, begun at 11:00:00 UTC (1 h ago)"
            ),
        ]
        assert {f.name for f in every_finding()} == alerts.NAMES

    def test_what_goes_on_and_what_is_over(self):
        for finding in every_finding():
            again = notice("again", info(finding, count=57), NOON).text
            assert again.startswith(f"still, since 11:00:00 UTC, 57 times: {finding.subject}: ")
            over = notice("resolved", info(finding), NOON).text
            assert over.startswith(f"resolved after 1 h: {finding.subject}: ")

    def test_details_of_another_version_do_not_break_it(self):
        for finding in every_finding():
            if finding.name not in ("backlog", "no_success"):
                assert notice("new", info(finding, detail={}), NOON).text

    def test_a_document_for_webhooks(self):
        document = notice("new", info(next(every_finding())), NOON).to_json()
        assert document["text"].startswith("sync: fails")
        assert document["alert"]["first_at"] == "2030-01-01T11:00:00.000Z"
        assert (document["state"], document["others"]) == ("new", [])


def groups(*subjects, code="http_503", name="circuit_open"):
    """Alerts of one cause."""
    return [info(Finding(name, s, {"error_code": code})) for s in subjects]


def accounts(count):
    return [f"github/{n}" for n in range(count)]


class TestGroups:
    def told(self, alerts, *, new=True, **size):
        due = [(one, new) for one in alerts]
        return words.begun(due, {one.cause: Size(**size) for one in alerts}, NOON)

    def test_what_has_one_cause(self):
        causes = {f.cause for f in every_finding()}
        assert "circuit_open github http_503" in causes  # a whole provider stands for itself
        same = Finding("circuit_open", "github/a", {"error_code": "http_503"}).cause
        assert same == Finding("circuit_open", "github/b", {"error_code": "http_503"}).cause
        assert same != Finding("circuit_open", "github/b", {"error_code": "timeout"}).cause
        assert same != Finding("circuit_open", "jira/b", {"error_code": "http_503"}).cause
        assert Finding("dead", "sync", {"error_code": "a"}).cause == Finding("dead", "sync", {"error_code": "b"}).cause

    def test_a_few_are_told_one_by_one(self):
        assert [n.alert.subject for n in self.told(groups(*accounts(5)))] == accounts(5)

    def test_many_are_told_as_one(self):
        told = self.told([*groups(*accounts(1000)), *groups("jira/1"), *groups("github/x", code="timeout")])
        assert [n.alert.subject for n in told] == ["github/0", "github/x", "jira/1"]
        assert "(and 999 others like it at github: github/1, github/10, github/100, …)" in told[0].text
        assert len(told[0].others) == 20

    def test_one_after_the_other_they_are_told_a_few_times(self):
        told = [n for n in range(1000) if self.told(groups(f"github/{n}"), announced=n)]
        assert told == [0, 1, 2, 3, 4, 5, 50, 500]
        (sixth,) = self.told(groups("github/5"), announced=5)
        assert sixth.text.endswith("(and 5 others like it at github)")

    def test_what_goes_on_is_told_once_for_all(self):
        (one,) = self.told(groups("github/3"), new=False, open=700, announced=699)
        assert one.state == "again"
        assert "(and 699 others like it at github)" in one.text
        assert len(self.told(groups(*accounts(5)), new=False, open=5)) == 5

    def test_the_end_is_told_when_all_are_over(self):
        over = groups(*accounts(3))
        assert words.ended(over, {over[0].cause: Size(open=4, closed=3)}, NOON) == []
        (last,) = words.ended(over, {over[0].cause: Size(closed=40)}, NOON)
        assert last.text.startswith("resolved after 1 h: github/0: its circuit is closed (and 39 others")
        assert len(words.ended(over, {over[0].cause: Size(open=2, closed=3)}, NOON)) == 3


class TestChats:
    @pytest.mark.parametrize(
        ("text", "slack", "other"),
        [
            ("a/1: fails", "a/1: fails", "a/1: fails"),
            ("<!channel> & <@U1>", "&lt;!channel&gt; &amp; &lt;@U1&gt;", "<\u200b!channel> & <\u200b@\u200bU1>"),
            ("<https://evil|pay>", "&lt;https://evil|pay&gt;", "<\u200bhttps://evil|pay>"),
            ("@everyone @all", "@everyone @all", "@\u200beveryone @\u200ball"),
            ("[pay](https://evil)", "[pay](https://evil)", "[pay]\u200b(https://evil)"),
            ("[pay][1] a[0] = 1", "[pay][1] a[0] = 1", "[pay]\u200b[1] a[0] = 1"),
            ("<a href=x>", "&lt;a href=x&gt;", "<\u200ba href=x>"),
            ("&lt;!here&gt;", "&amp;lt;!here&amp;gt;", "&lt;!here&gt;"),
        ],
    )
    def test_markup_of_strangers_is_text(self, text, slack, other):
        assert words.for_chat(text, "hooks.slack.com") == slack
        for host in ("discord.com", "contoso.webhook.office.com", "chat.example", "?"):
            assert words.for_chat(text, host) == other
            assert words.for_chat(text, host).replace("\u200b", "") == text
