"""What is found, by pure rules."""

from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.alerts import rules as alerts
from resilient.core.alerts.rules import Alerting, Finding
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
            *(({name: None}, rf"^Alerting\({name}=None\): give a span") for name in ("repeat", "settle", "quiet")),
            ({"window": None}, r"^Alerting\(window=None\): give a span of time, such as '1h'$"),
            ({"failure_rate": 1.5}, r"^Alerting\(failure_rate=1.5\): give a share above 0, at most 1$"),
            ({"failure_rate": 0}, r"^Alerting\(failure_rate=0\)"),
            ({"failure_volume": 0}, "^Alerting: failure_volume and periods are whole numbers from 1$"),
            ({"periods": 0}, "^Alerting: failure_volume and periods are whole numbers from 1$"),
            ({"periods": 10_001}, r"^Alerting\(periods=10001\): give at most 10,000, or None for no rule$"),
            ({"off": {"noise"}}, "there is no alert 'noise' to switch off: backlog, "),
            *(
                (
                    {"sinks": [sink]},
                    "^a sink of alerts is a function of one notice, or a URL beginning with https://$",
                )
                for sink in ("ftp://x", "https://", "https:///hook", "http://[::1", "hooks.example.com/x", 5)
            ),
            (
                {"sinks": "https://hooks.example.com/s3cret"},
                r"^Alerting\(sinks=...\) lists functions and URLs: write \[it",
            ),
            (
                {"sinks": ["https://discord.com/api/webhooks/1/s3cret"]},
                (
                    "^a sink of alerts is a webhook of Discord, which takes notices in Slack's form only: write /slack"
                    r" behind its URL \(https://discord.com/api/webhooks/…/…/slack\)$"
                ),
            ),
            ({"sinks": ["https://canary.discord.com/api/webhooks/1/s3cret"]}, "write /slack behind its URL"),
            ({"sinks": ["https://discord.com/api/webhooks/1/slackX"]}, "write /slack behind its URL"),
            ({"sinks": ["https://ptb.discord.com/api/v10/webhooks/1/s3cret/"]}, "write /slack behind its URL"),
            ({"sinks": ["https://discordapp.com/api/webhooks/1/s3cret/github"]}, "write /slack behind its URL"),
        ],
    )
    def test_mistakes(self, given, words):
        with pytest.raises(InvalidInput, match=words):
            Alerting(**given)

    def test_the_least_and_the_most_that_is_taken(self):
        config = Alerting(failure_rate=1, failure_volume=1, periods=1, backlog=None, off={"dead"})
        assert (config.failure_rate, config.failure_volume, config.periods) == (1, 1, 1)
        assert [name for name in ("dead", "backlog") if config.wants(name)] == ["backlog"]
        assert Alerting(failure_rate=None, periods=None).periods is None

    def test_functions_and_addresses_are_sinks(self):
        good = [print, "https://alerts.example/x", "http://localhost:9/x"]
        assert list(Alerting(sinks=good).sinks) == good

    def test_a_webhook_of_discord_takes_notices_in_slacks_form(self):
        good = ["https://discord.com/api/webhooks/1/s3cret/slack", "https://discord.example/api/webhooks/1/s3cret"]
        good.append("https://discord.com/api/webhooks/1/s3cret/slack/")
        assert list(Alerting(sinks=good).sinks) == good
        with pytest.raises(InvalidInput) as refused:
            Alerting(sinks=["https://discord.com/api/webhooks/1/s3cret"])
        assert "s3cret" not in str(refused.value)

    def test_it_shows_everything_but_its_sinks(self):
        assert repr(Alerting(sinks=["https://hooks.example.com/s3cret"], off=["dead"])) == (
            "Alerting(1 sinks, repeat=datetime.timedelta(seconds=3600), settle=datetime.timedelta(seconds=300),"
            " quiet=datetime.timedelta(days=1), failure_rate=0.5, failure_volume=20,"
            " window=datetime.timedelta(seconds=600), backlog=datetime.timedelta(seconds=900),"
            " throttled=datetime.timedelta(days=1), periods=3, off=['dead'])"
        )

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
        assert found.detail["error"] == ("boom " * 60)[:299] + "…"

    def test_what_ended_without_an_execution_is_the_same_alert(self):
        met = alerts.ended("dead", "mail", "expired", None, error="late", resource="a", job="1")
        assert alerts.swept("mail", "expired", 3, "17").fingerprint == met.fingerprint


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

    def test_what_is_said_of_each(self):
        row = {
            **CALM, "breaker": "open", "opened_at": NOON - HOUR, "open_until": NOON + HOUR, "auth": "needs_reauth",
            "auth_since": NOON - 2 * HOUR, "blocked_since": NOON - 3 * HOUR, "blocked_until": NOON + 25 * HOUR,
            "blocked_code": "abuse", "last_error": "no " * 60 + "\nmore", "last_error_code": "http_503",
        }  # fmt: skip
        assert alerts.of_resource(row, NOON, timedelta(days=1)) == [
            Finding(
                "circuit_open",
                "github/a",
                {
                    "since": "2030-01-01T11:00:00+00:00", "until": "2030-01-01T13:00:00+00:00",
                    "error": ("no " * 60).strip(), "error_code": "http_503",
                },
            ),
            Finding("needs_reauth", "github/a", {"auth": "needs_reauth", "since": "2030-01-01T10:00:00+00:00"}),
            Finding(
                "long_throttle",
                "github/a",
                {"since": "2030-01-01T09:00:00+00:00", "until": "2030-01-02T13:00:00+00:00", "code": "abuse"},
            ),
        ]  # fmt: skip
        long = alerts.of_resource({**row, "last_error": "x" * 999}, NOON, None)[0]
        assert long.detail["error"] == "x" * 299 + "…"
        assert self.of(blocked_until=NOON + timedelta(days=1)) == []  # no longer than that

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
        waiting += [("github/c/search", "4", NOON - 2 * HOUR), ("crm/a/search", "5", NOON - timedelta(minutes=31))]
        waiting += [("mail/a", "6", NOON - timedelta(minutes=30))]  # not yet
        assert alerts.of_backlog(waiting, NOON, timedelta(minutes=30)) == [
            Finding("backlog", "crm", {"resource": "crm/a/search", "job": "5", "since": "2030-01-01T11:29:00+00:00"}),
            Finding("backlog", "github", {"resource": "github/b", "job": "2", "since": "2030-01-01T10:00:00+00:00"}),
        ]


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
        assert self.found([("sync", "a/1")] * 3, [("sync", "a/1")] * 2) == set()

    def test_what_is_said(self):
        numbers = {"failed": 30, "executions": 40}
        assert alerts.of_executions([("sync", "a/1")] * 10, [("sync", "a/1")] * 30, 0.5, 20) == [
            Finding("failure_rate", "sync", {"of": "kind", **numbers}, ("kind",)),
            Finding("failure_rate", "a/1", {"of": "resource", **numbers}, ("resource",)),
        ]


class TestSilence:
    def silent(self, now, succeeded_at=None, periods=3, since=NOON):
        return alerts.of_schedule("s", ticks(every="1h"), since, succeeded_at, now, periods) is not None

    def test_n_ticks_had_their_whole_period(self):
        assert not self.silent(NOON + 4 * HOUR - timedelta(seconds=1))
        assert self.silent(NOON + 4 * HOUR)
        assert self.silent(NOON + 2 * HOUR, periods=1)
        assert not self.silent(NOON + HOUR, periods=1)

    @pytest.mark.parametrize(("succeeded_at", "ever"), [(None, False), (NOON - HOUR, True)])
    def test_what_is_said(self, succeeded_at, ever):
        found = alerts.of_schedule("s", ticks(every="1h"), NOON, succeeded_at, NOON + 9 * HOUR, 3)
        assert found == Finding("no_success", "s", {"since": "2030-01-01T12:00:00+00:00", "ever": ever, "periods": 3})

    def test_a_stream_and_a_schedule_of_one_name_are_two_alerts(self):
        stream = alerts.of_stream("s", 1, "a/1", NOON, ever=True, periods=3)
        schedule = alerts.of_accounts("s", 1, "a/1", NOON, ever=True, periods=3)
        assert (stream.parts, schedule.parts) == (("stream",), ())
        assert stream.fingerprint != schedule.fingerprint

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
