"""What `tests.mutation` changes, which tests must notice, and what nobody can notice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Room(NamedTuple):
    """Files and folders of the package, and the tests that must notice.

    ``functions``: a pattern of the names of those that are changed. In `store` these decide; the statements beside them
    are held by the tests of both databases, and a changed word of SQL fails at once.
    """

    places: tuple[str, ...]
    tests: tuple[str, ...]
    functions: str = ""


MORE = {"base": ("test_misfit",)}  # these reach it through the package's public names


def of_core(name):
    """A room of core: its tests are those of core that import it, and `MORE`."""
    says = re.compile(rf"resilient\.core(\.{name}\b| import .*\b{name}\b)")
    files = sorted((ROOT / "tests/core").glob("test_*.py"))
    tests = [path for path in files if path.stem in MORE.get(name, ()) or says.search(path.read_text())]
    return Room((f"core/{name}",), tuple(str(path.relative_to(ROOT)) for path in tests))


CORE = ("accounts", "alerts", "base", "events", "gates", "inspect", "jobs", "provider", "schedules", "sync")
ROOMS = {f"core/{name}": of_core(name) for name in CORE} | {
    "store/claim": Room(
        ("store/jobs/claim.py", "store/jobs/claim_snapshot.py"),
        tuple(f"tests/store/test_claim{name}.py" for name in ("", "_budgets", "_slots", "_suspects")),
        r"_Claim\._(drop_stopped|within_budgets|room_of|drop_idle|build_levels|admit|judge)$|\._?(alike|is_calm)$",
    ),
    "store/filters": Room(
        ("store/jobs/filters.py",),
        ("tests/store/test_filter_words.py", "tests/store/test_queries_filters.py"),
        r"JobFilter\.|\.(as_id|conditions|_one_of|_moments|within|matches|_glob)$",
    ),
    "store/gates": Room(
        ("store/gates",),
        tuple(f"tests/store/test_{name}.py" for name in ("circuits", "gate_decisions", "gates", "limits")),
        r"\._(rested|circuit|slow_start|settle|draw|regex|globs|calm|closed)$|\.(best_of_each|recheck_in)$",
    ),
    "store/changes": Room(
        ("store/jobs/changes.py",), ("tests/store/test_queries_changes.py",), r"\.(sort|verb|usual|allowed|_spread)$"
    ),
}

# What cannot be noticed, or is nobody's promise: (the end of a function's name, a part of the changed line) -> why.
SAME: dict[tuple[str, str], str] = {
    ("misfit.check_number", '"INF"'): "another spelling of the same number",
    ("misfit._items", "strict=None"): "both have one for each item",
    ("misfit._items", "strict=False"): "both have one for each item",
    ("misfit._items", "zip(value, parts, )"): "both have one for each item",
    ("misfit._class_of", '"_is_protocol", None)'): "neither says that it is a protocol",
    ("phrases.figure", '"XX0XX"'): "the text of a number has no such letter",
    ("phrases.figure", '"XX.XX"'): "the text of a number has no such letter",
    ("phrases.rough", "part / 2"): "the half of a second decides nothing among whole seconds",
    ("phrases.counted", '"more", None)'): "neither says that there are more",
    ("phrases.plain", "and False else _HIDDEN"): "slower, and the same for ASCII",
    ("phrases.plain", "or True else text"): "slower, and the same where nothing is hidden",
    ("phrases._written", "number <= 0x100"): "the character of that number is never hidden",
    ("phrases._written", "number < 257"): "the character of that number is never hidden",
    ("phrases._written", "number <= _ASTRAL"): "the character of that number is never hidden",
    ("phrases._written_in_json", "number <= _ASTRAL"): "the character of that number is never hidden",
    ("loggers.FailureLog.__init__", "self._is_failing = None"): "neither is a failure that lasts",
    ("loggers.FailureLog.worked", "self._is_failing = None"): "neither is a failure that lasts",
    ("webhook.challenge", "or True"): "a webhook that asks nothing has no place of a question",
    ("webhook.challenge", '"SHA256"'): "another spelling of the same name",
    ("webhook._encoded", '"ASCII"'): "another spelling of the same name",
    ("webhook._form", '"UTF-8"'): "another spelling of the same name",
    ("webhook._bytes", '"UTF-8"'): "another spelling of the same name",
    ("webhook._proves", "or True"): "without the address in the text all its spellings give the same",
    ("webhook._time_text", 'else "XXXX"'): "neither is a time, and the delivery is refused before it is put in",
    ("webhook._fits_hash", "received.fields, None"): "no body holds its own hash",
    ("webhook._is_form", '"XXXX"'): "neither is the type of a form",
    ("rules._is_bare_discord", 'or "XXXX"'): "neither is a host of Discord",
    ("words.ended", "_by_cause((one, True)"): "all of them have the same word, and it is dropped",
    ("cron._walk", 'or "XXXX"'): "only cron expressions come here; the type checker wants the rest",
    ("cron._back", 'or "XXXX"'): "only cron expressions come here; the type checker wants the rest",
    ("cron._in_utc", 'or "XXXX"'): "only cron expressions come here; the type checker wants the rest",
    ("cron._walk", "zone, 2)"): "only the sign of the way counts",
    ("cron._back", "zone, -2)"): "only the sign of the way counts",
    ("cron._in_utc", "way >= 0"): "the way is never 0",
    ("cron._in_utc", "/ way"): "the same as a product, for 1 and -1",
    ("cron._in_utc", ">= timedelta(0)"): "no moment shows two local times",
    ("cron._in_utc", 'datetime | None = ""'): "neither is the moment of a tick",
    ("cron._moments", "first <= second"): "equal ones were returned before",
    ("cron._back", "seconds=2"): "ticks after now are left out anyway",
    ("cron._shift_near", "days=2"): "a longer run-up yields the same ticks",
    ("cron._shift_near", ") + (before"): "a longer run-up yields the same ticks",
    ("_Claim._build_levels", "or True else {}"): "asked about no key, it says nothing",
    ("limits._draw", "ask.limits, strict="): "both have one for each limit",
    ("limits._draw", "zip(ids, ask.limits, )"): "both have one for each limit",
    ("limits._draw", "draw.states, "): "both have one for each limit",
    ("cron._shift_near", "timedelta(1)"): "a longer run-up yields the same ticks",
    ("Tracing.__init__", 'self._provider: Any = ""'): "no provider is either",
    ("Tracing.__init__", 'self._tracer: Tracer | None = ""'): "nobody reads it before there is a provider",
    ("Tracing.document", "parent[-3:]"): "with the hyphen it is a negative number, as odd or as even",
    ("tracing._headers", "1 < len(state)"): "no state has one character",
    ("tracing.forget_current", "set_span_in_context(None)"): "the API takes it for the span of no trace",
    ("hosts.is_private", 'localhostXX" or'): "a name without a dot is private anyway",
    ("hosts.is_private", '"LOCALHOST" or'): "a name without a dot is private anyway",
    ("hosts._without_logins", '"@" not in text and'): "then no word is changed",
    ("hosts._without_logins", "or True else word"): "without an @ no word is changed",
    ("Origins.holds", "_answers.get(None)"): "remembered only to be quick",
    ("Origins.holds", "_answers[origin] = None"): "remembered only to be quick",
    ("budgets.budgets", "or True else now - now"): "without a Date both are zero",
    ("budgets._leading", "or True else None"): "no text is no number",
    (
        "instants._any_date",
        "clock[2] / 60",
    ): "less than a second is taken off a moment that is later than midnight by more",
    ("instants._micros", "fraction[:19]"): "the rest is rounded up either way",
    ("classify.classify", "provider, None)"): "the same codes, looked for once more",
    ("classify.classify", "provider, )"): "the same codes, looked for once more",
    ("classify.cost_of", '"INF"'): "another spelling of the same number",
    ("classify._computed", '"INF"'): "another spelling of the same number",
    ("classify.believed", "window = 1.0"): "what is shorter than a day is believed anyway",
    ("classify._next", "replace(day=2)"): "any day of the next month will do",
    ("classify._next", "days=33"): "any day of the next month will do",
    ("Basic.headers", '"ASCII"'): "another spelling of the same name",
    ("OAuth2.__post_init__", "above=None"): "neither says that it must be above",
    ("placeholders.check_placeholders", '"XXXX"'): "only braces are looked for in the rest",
    ("resource_key.may_hold", "depth(pattern) >= depth(key)"): "one as deep is its own beginning",
    ("policy.tenancy_of", '.sub("XXXX"'): "what stands before the last placeholder is not read",
    ("policy.tenancy_of", "fixed[2:]"): "no host has an empty label",
    ("Policies.for_key", "_by_key.get(None)"): "remembered only to be quick",
    ("Policies._choose", "_by_key[key] = None"): "remembered only to be quick",
    ("policy._possible", "first >= longest"): "then it is the same time",
    ("policy._specificity", "-2 if"): "only their order counts",
    ("policy._specificity", "else 3 for"): "only their order counts",
    ("retry_after._plain_text", "Word.ISO8601, None"): "a time with its date does not depend on now",
    ("retry_after._retry_after", "read(value, None"): "a word of no other form is read as an HTTP-date",
    ("CommonLimit.throttled", "wait or 1.0"): "neither is a long wait",
    ("breaker._open_until", "min(step, 33)"): "a circuit is never open for 2,000 years",
    ("learnt._bounded", '"INF"'): "another spelling of the same number",
    ("learnt.allowance", "max(elapsed, 1.0)"): "in the first second nothing has doubled",
    ("Limit.__init__", "strict="): "both have one for each field",
    ("Limit.__init__", "zip(fields(self), values, )"): "both have one for each field",
    ("rate_limit.draw", "strict="): "both have one for each limit",
    ("rate_limit.draw", "moments, )"): "both have one for each limit",
    ("decide._decide", "_step(job, None, "): "`_expired` says it again, of every step",
    ("decide._decide", "_step(job, JobState.DEAD, None, "): "`_expired` says it again, of every step",
    ("decide._decide", '_step(job, JobState.DEAD, "XX'): "`_expired` says it again, of every step",
    ("decide._decide", '_step(job, JobState.DEAD, "EXPIRED"'): "`_expired` says it again, of every step",
    ("decide._decide", "assert_never(None)"): "nothing comes here; the type checker wants it",
    ("decide._failed", "job.deferrals + 1), None)"): "the step itself says that it runs now",
    ("decide._charged", "run_at, now), None)"): "the step has a time, which is never before now",
    ("decide._uncharged", "REFUSALS, 11)"): "any exponent that passes the longest pause will do",
    ("decide._snoozed", "delay = 1.0"): "a cancelled job has no next try",
    ("decide._provider_time", "failure.retry_in >= 0"): "no time at all lies never ahead",
    ("records._hide", "anywhere=None)"): "neither lets a path begin there",
    ("_Claim._within_budgets", "if (kinds) or True else []"): "for no kinds nothing is read, in one statement more",
    ("_Claim._within_budgets", "per_key + 2, kinds)"): "one more than may start is looked at, so as to see if any are",
    ("_Claim._room_of", "lock_leaves(self.c, self.d, [budget])"): "in SQLite nobody else holds a row in that moment",
    ("_Claim._room_of", "lock_leaves(self.c, self.d, [budget], )"): "in SQLite nobody else holds a row in that moment",
    ("_Claim._room_of", "self._policy(budget), 1"): "where they need not be counted, their number counts for nothing",
    ("_Claim._room_of", "most, self.now, None)"): "the probe that it elects is thrown away",
    ("why._budget", "(stop.until) or True"): "a limit always has an end; the type checker wants the rest",
    ("why._gate_text", 'stop.code or "XXXX"'): "neither is a state of credentials",
    ("why._gate_text", "concurrency or 1"): "only a cap stops so; the type checker wants the rest",
    ("why.gates", "now, None, priority)"): "the probe that it elects is thrown away",
    ("why.budgets", "now, None).stop"): "the probe that it elects is thrown away",
}
