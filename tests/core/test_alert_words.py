"""How alerts read: each in a line, many of one cause in one notice, and in a chat."""

from datetime import timedelta

import pytest

from resilient.core.alerts import rules as alerts
from resilient.core.alerts import words
from resilient.core.alerts.overview import Overview
from resilient.core.alerts.rules import AlertInfo, Finding
from resilient.core.alerts.words import Size, notice
from resilient.core.jobs.records import Count
from resilient.core.schedules.cron import ticks
from tests.core.test_alerts import CALM, HOUR, NOON


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
    since = NOON - HOUR
    error = {"last_error": "503 Service Unavailable", "last_error_code": "http_503"}
    row = {**CALM, "key": "github", "breaker": "open", "opened_at": since, "open_until": NOON + HOUR, **error}
    throttled = {**CALM, "blocked_until": NOON + 99 * HOUR, "blocked_code": "abuse"}
    yield alerts.ended("new_error", "sync", "transient", "http_503", error="no", resource="github/a", job="17")
    yield alerts.ended("dead", "sync", "bug", None, error="KeyError: 'x'", resource="github/a", job="17")
    yield alerts.swept("mail", "expired", 3, "17")
    yield alerts.repaired(2)
    yield alerts.repaired(3, "workflows")
    yield from alerts.of_resource(row, NOON, timedelta(days=1))
    yield from alerts.of_resource(throttled, NOON, timedelta(days=1))
    yield from alerts.of_resource({**CALM, "auth": "needs_reauth", "auth_since": since}, NOON, None)
    yield alerts.of_credentials("github", "invalid_client", None)
    yield alerts.of_executions([("sync", "a/1")] * 10, [("sync", "a/1")] * 30, 0.5, 20)[0]
    yield from alerts.of_backlog([("github/a", "17", since)], NOON, timedelta(minutes=30))
    yield alerts.of_stuck_handlers("sync", 2, "17", "github/a", NOON - HOUR)
    yield alerts.of_database("postgresql://u:***@h/x", NOON - HOUR, "h:1:ab", DOWN)
    yield alerts.of_schedule("s", ticks(every="5m"), since, None, NOON, 3)
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

    def test_what_no_look_finds_any_more_says_when_one_last_did(self):
        for finding in every_finding():
            young = notice("new", info(finding), NOON + timedelta(seconds=90)).text
            old = notice("new", info(finding), NOON + timedelta(seconds=91)).text
            assert "not found" not in young
            assert old.endswith(" (last found at 12:00:00 UTC)") is (finding.name in alerts.CONDITIONS)

    @pytest.mark.parametrize(
        ("finding", "text"),
        [
            (
                alerts.repaired(1),
                "1 resource with ready jobs fell out of the line for the workers, and went on by repair",
            ),
            (alerts.repaired(2, "lanes"), "2 ordering keys stood still and went on by repair"),
            (alerts.repaired(1, "jobs"), "1 job waited for others that were over and went on by repair"),
        ],
    )
    def test_what_was_repaired_is_a_bug(self, finding, text):
        told = notice("new", info(finding), NOON).text
        assert told == f"{finding.subject}: {text}. This is a bug: please report it"

    @pytest.mark.parametrize(
        ("finding", "count", "text"),
        [
            (
                alerts.ended("dead", "sync", "bug", "KeyError", error="KeyError: 'x'", resource="a", job="1"),
                2,
                "2 jobs are dead, bug KeyError (job 1): 'x'",
            ),
            (
                alerts.stuck("order", "17"),
                2,
                (
                    "workflow 17 (and 1 other of that name) cannot be undone, an undo of it is dead: see `resilient"
                    " workflows show 17`, then retry or discard that job"
                ),
            ),
            (
                alerts.stuck("order", "17"),
                4,
                (
                    "workflow 17 (and 3 others of that name) cannot be undone, an undo of it is dead: see `resilient"
                    " workflows show 17`, then retry or discard that job"
                ),
            ),
            (
                alerts.of_stuck_handlers("sync", 1, "17", "a/1", NOON),
                1,
                (
                    "a handler of it does not end after its time (job 17 on a/1 since 12:00:00 UTC): until then the job"
                    " stays running and counts against caps; if it hangs for good, restart that worker"
                ),
            ),
            (
                Finding("long_throttle", "a/1", {}),
                1,
                "the provider asked to wait; if that cannot be meant, reset the resource",
            ),
            (
                alerts.of_accounts("each", 1, "a/1", NOON, ever=False, periods=1),
                1,
                "1 account had no success for 1 tick in a row; a/1 had none since 12:00:00 UTC (less than 1 s ago)",
            ),
            (
                alerts.of_schedule("s", ticks(every="1m"), NOON - HOUR, NOON - HOUR, NOON, 2),
                1,
                "its last job succeeded at 11:00:00 UTC (1 h ago); 2 ticks in a row brought no success",
            ),
            (
                alerts.of_credentials("a/1", "broken", NOON),
                1,
                "its credentials are broken since 12:00:00 UTC; its jobs wait",
            ),
            (
                alerts.of_credentials("a/1", "not_connected", NOON),
                1,
                "it was never connected (`resilient connect`), and its jobs wait for that, since 12:00:00 UTC",
            ),
            (
                alerts.of_database("sqlite:///x", NOON, "h:1:ab", None),
                1,
                (
                    "the engine's database does not answer worker h:1:ab since 12:00:00 UTC: no job begins, and results"
                    " are kept until it does"
                ),
            ),
        ],
        ids=lambda value: getattr(value, "name", None),
    )
    def test_other_numbers_and_states(self, finding, count, text):
        assert notice("new", info(finding, count=count), NOON).text == f"{finding.subject}: {text}"

    def test_what_the_database_said_is_cut(self):
        found = alerts.of_database(
            "sqlite:///x", NOON, "h:1:ab", "the database sqlite:///x does not answer: " + "x" * 999
        )
        assert found.detail["error"] == "x" * 299 + "…"
        assert alerts.of_database("sqlite:///x", NOON, "h:1:ab", None).detail["error"] == ""

    @pytest.mark.parametrize(
        ("name", "detail", "text"),
        [
            ("failure_rate", {}, "0% of its last 1 execution failed"),
            ("invariant", {}, "1 resource with ready jobs fell out of the line for the workers, and went on by repair"),
            ("stuck_handler", {}, "a handler of it does not end after its time"),
            (
                "no_success",
                {},
                "no job of it succeeded since 12:00:00 UTC (less than 1 s ago); 1 tick in a row brought",
            ),
            ("no_success", {"accounts": 2}, "2 accounts had no success for 1 tick in a row; None had none since"),
            ("no_success", {"stream": True}, "no pass of this stream ended in time for 0 accounts, 1 times as long as"),
        ],
    )
    def test_numbers_that_another_version_left_out(self, name, detail, text):
        finding = Finding(name, "s", {"since": NOON.isoformat(), **detail})
        assert notice("new", info(finding), NOON).text.startswith(f"s: {text}")

    def test_what_happened_once_has_no_number(self):
        finding = alerts.swept("mail", "expired", 1, "17")
        told = notice("again", info(finding), NOON)
        assert told.text == "still, since 11:00:00 UTC: mail: a job is dead, expired (job 17)"
        assert (told.state, notice("resolved", info(finding), NOON).state) == ("again", "resolved")

    def test_details_of_another_version_do_not_break_it(self):
        for finding in every_finding():
            if finding.name not in ("backlog", "no_success"):
                assert notice("new", info(finding, detail={}), NOON).text

    def test_an_alert_of_a_newer_version_is_shown_by_its_name(self):
        one = info(Finding("from_tomorrow", "crm/a", {"what": 1}))
        said = "crm/a: from_tomorrow (an alert of a newer version, which has the words for it)"
        assert notice("new", one, NOON).text == said
        assert notice("resolved", one, NOON).text.endswith("crm/a: from_tomorrow")
        assert [n.text for n in words.begun([(one, True)], {}, NOON)] == [said]

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

    def test_each_is_told_in_the_words_of_its_state(self):
        (one,) = groups("github/1")
        for new, state in ((True, "new"), (False, "again")):
            for sizes in ({}, {one.cause: Size(open=1)}):
                assert words.begun([(one, new)], sizes, NOON) == [notice(state, one, NOON)]

    def test_a_resource_of_an_account_counts_for_its_provider(self):
        (told,) = self.told(groups(*(f"github/{n}/search" for n in range(6))))
        assert "(and 5 others like it at github: github/1/search, " in told.text

    def test_one_after_the_other_they_are_told_a_few_times(self):
        told = [n for n in range(1000) if self.told(groups(f"github/{n}"), announced=n)]
        assert told == [0, 1, 2, 3, 4, 5, 50, 500]
        (sixth,) = self.told(groups("github/5"), announced=5)
        assert sixth.text.endswith("(and 5 others like it at github)")

    def test_what_goes_on_is_told_once_for_all(self):
        (one,) = self.told(groups("github/3"), new=False, open=700, announced=3)
        assert one.state == "again"
        assert "(and 699 others like it at github)" in one.text
        assert len(self.told(groups(*accounts(5)), new=False, open=5)) == 5

    def test_the_end_is_told_when_all_are_over(self):
        over = groups(*accounts(3))
        assert words.ended(over, {over[0].cause: Size(open=4, closed=3)}, NOON) == []
        (last,) = words.ended(over, {over[0].cause: Size(closed=40)}, NOON)
        assert last.text.startswith("resolved after 1 h: github/0: its circuit is closed (and 39 others")
        assert len(words.ended(over, {over[0].cause: Size(open=2, closed=3)}, NOON)) == 3

    def test_each_end_is_told_in_words_of_its_own(self):
        over = [*groups("github/1"), *groups("jira/1")]
        assert words.ended(over, {}, NOON) == [notice("resolved", one, NOON) for one in over]
        (all_of_them,) = words.ended(groups(*accounts(6)), {}, NOON)
        assert "(and 5 others like it at github: " in all_of_them.text


def test_an_overview_is_a_document():
    empty = {"workers": [], "stopped": [], "retrying": [], "died": [], "alerts": []}
    overview = Overview(at=NOON, jobs={"ready": Count(2)}, lately={}, overdue=Count(0), stranded=0, **empty)
    assert overview.to_json() == {
        "at": "2030-01-01T12:00:00.000Z", "jobs": {"ready": 2}, "lately": {}, "overdue": 0, **empty, "stranded": 0,
        "unserved": {}, "unserved_accounts": {}, "learnt": {}, "lanes": [], "lane_count": 0,
    }  # fmt: skip


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
