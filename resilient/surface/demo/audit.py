"""The audit compares the provider's own log with the database. Pure; decides what is true, prints nothing.

The log is believed, the engine is not. Each `Claim` is one sentence of the promise with what was found; the
demo succeeds only if all of them hold. A request that reaches the provider during a cooldown is forgiven
only if nobody could know yet when it was sent, which is taken to be so within `ON_THE_WIRE` of the answer
that announced it: that answer still has to travel, be read, be written where other processes see it, and
they look at most a quarter of a second later. What was forgiven is counted and said.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from resilient.surface.demo.accounts import PROVIDER, UNDECLARED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from resilient.surface.demo.screen import JobView

ON_THE_WIRE: Final = 0.5  # seconds
MOST_REFUSED: Final = 10  # by a limit that must be found first: 1 to 4, and 12 or more without learning
FAR: Final = 2.0  # times what is allowed; a rate is tried out upwards now and then
MOST_INTO_OUTAGE: Final = 48  # what two workers have in flight, until three accounts agree, and a few probes
_SHOWN: Final = 5  # culprits named per broken claim


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence, whether it is true, and what it rests on."""

    text: str
    result: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is judged: the provider's ``log``, what the database says now, and what should be there.

    ``contacts`` are the ids that were enqueued, ``records`` what was read in, ``expected`` what the provider holds,
    ``pushed`` the application's own rows, one for each contact that was pushed. ``learnt`` is the rate that refusals
    taught about the account whose limit nobody declared, ``allowed`` what it really is.
    """

    log: Sequence[Mapping[str, Any]]
    jobs: Sequence[JobView]
    contacts: Sequence[str]
    on_the_wire: float = ON_THE_WIRE
    records: Sequence[str] = ()
    expected: Sequence[str] = ()
    pushed: Sequence[str] = ()
    learnt: float | None = None
    allowed: float = 5.0


@dataclass(frozen=True, slots=True)
class Audit:
    """``claims`` decide; ``facts`` say how hard it was; ``dead`` are contacts and why their jobs died."""

    claims: tuple[Claim, ...]
    facts: tuple[str, ...]
    dead: tuple[tuple[str, str], ...]

    @property
    def passed(self) -> bool:
        """Whether every claim holds."""
        return all(claim.holds for claim in self.claims)


def audit(evidence: Evidence) -> Audit:
    """Judge a run."""
    log, jobs, contacts = evidence.log, evidence.jobs, set(evidence.contacts)
    stored = Counter(e["contact"] for e in log if e["decision"] == "stored")
    invalid = {e["contact"] for e in log if e["decision"] == "invalid"}
    claims = (
        _delivered(contacts, stored, invalid),
        _duplicates(stored),
        _cooldowns(log, evidence.on_the_wire),
        _dead(jobs, invalid),
        _lost(contacts, jobs, stored),
        _waiting(jobs),
        _read_in(evidence),
        _grants(log),
        _outage(log),
        _noted(evidence, stored),
        _events(evidence),
        _order(log),
        _undeclared(evidence),
    )
    dead = tuple(sorted((job.contact, job.error or "no reason") for job in jobs if job.state == "dead"))
    return Audit(claims, _facts(log, jobs), dead)


def _delivered(contacts: set[str], stored: Counter[str], invalid: set[str]) -> Claim:
    valid = contacts - invalid
    missing = sorted(valid - set(stored))
    once = sum(stored[contact] == 1 for contact in valid)
    return Claim(
        "Every valid contact was delivered, once each",
        f"{once} of {len(valid)}" + _named(missing, "missing"),
        once == len(valid) and bool(contacts),
    )


def _duplicates(stored: Counter[str]) -> Claim:
    twice = sorted(contact for contact, n in stored.items() if n > 1)
    return Claim("Duplicates at the provider", f"{len(twice)}" + _named(twice, "stored twice"), not twice)


def _cooldowns(log: Sequence[Mapping[str, Any]], on_the_wire: float) -> Claim:
    early = [e for e in log if e.get("in_cooldown")]
    sent = [e for e in early if e["late"] > on_the_wire]
    forgiven = [e["late"] for e in early if e["late"] <= on_the_wire]
    result = f"{len(sent)}"
    if forgiven:
        latest = max(forgiven) * 1000
        result += f" ({len(forgiven)} more were on the wire when one began: they arrived within {latest:.0f} ms)"
    named = sorted({f"{e['account']}/{e['endpoint']} {e['late']:.2f} s into it" for e in sent})
    return Claim("Requests sent during a cooldown", result + _named(named, "the provider saw"), not sent)


def _dead(jobs: Sequence[JobView], invalid: set[str]) -> Claim:
    dead = {job.contact for job in jobs if job.state == "dead"}
    unexplained = [job.contact for job in jobs if job.state == "dead" and not job.error]
    wrong = sorted((dead ^ invalid) | set(unexplained))
    return Claim(
        "Dead jobs are the contacts the provider refused, each with its reason",
        f"{len(dead)} dead, {len(invalid)} refused" + _named(wrong, "not both"),
        not wrong,
    )


def _lost(contacts: set[str], jobs: Sequence[JobView], stored: Counter[str]) -> Claim:
    by_contact = Counter(job.contact for job in jobs)
    lost = {contact for contact in contacts if by_contact[contact] != 1}
    lost |= {job.contact for job in jobs if job.state not in ("succeeded", "dead")}
    lost |= {job.contact for job in jobs if (job.state == "succeeded") != (stored[job.contact] > 0)}
    return Claim(
        "Lost jobs, or jobs whose state says something else than the provider",
        f"{len(lost)}" + _named(sorted(lost), "see"),
        not lost,
    )


def _waiting(jobs: Sequence[JobView]) -> Claim:
    charged = sorted(job.contact for job in jobs if job.charged_waits)
    return Claim("Attempts charged for waiting (429)", f"{len(charged)}" + _named(charged, "charged"), not charged)


def _read_in(evidence: Evidence) -> Claim:
    """Each page and its cursor were committed together: nothing is missing, nothing stands there twice."""
    there, expected = Counter(evidence.records), set(evidence.expected)
    wrong = sorted({*(expected - there.keys()), *(one for one, n in there.items() if n > 1 or one not in expected)})
    result = f"{len(there)} of {len(expected)}" + _named(wrong, "missing or doubled")
    return Claim("Records read in from the accounts, once each", result, not wrong)


def _grants(log: Sequence[Mapping[str, Any]]) -> Claim:
    """Accounts that had to be connected more than once, although their owner did not revoke the access."""
    decisions = {what: Counter(e["account"] for e in log if e["decision"] == what) for what in ("connected", "revoked")}
    lost = sorted(a for a, n in decisions["connected"].items() if n > 1 + decisions["revoked"][a])
    stuck = sorted(a for a, n in decisions["revoked"].items() if decisions["connected"][a] < 1 + n)
    refreshed = sum(e["decision"] == "refreshed" for e in log)
    text = "Accounts that lost their grant, by refresh tokens that rotate every few seconds"
    result = f"{len(lost)} ({refreshed} refreshes, {decisions['revoked'].total()} revoked and connected again)"
    return Claim(text, result + _named(lost, "lost") + _named(stuck, "not connected again"), not lost and not stuck)


def _outage(log: Sequence[Mapping[str, Any]]) -> Claim:
    """Some accounts' failures were enough to stop all of them."""
    sent = sum(e["decision"] == "outage" for e in log)
    return Claim(
        f"Requests sent into the provider's outage, by all accounts together: at most {MOST_INTO_OUTAGE}",
        f"{sent}",
        sent <= MOST_INTO_OUTAGE,
    )


def _noted(evidence: Evidence, stored: Counter[str]) -> Claim:
    """The row was committed with the job's success: once, whatever was repeated at the provider."""
    rows = Counter(evidence.pushed)
    wrong = sorted({*(stored.keys() ^ rows.keys()), *(one for one, n in rows.items() if n > 1)})
    result = f"{len(evidence.pushed)} for {len(stored)} contacts" + _named(wrong, "missing or doubled")
    return Claim("Rows of the application, one for each contact that was pushed", result, not wrong)


def _events(evidence: Evidence) -> Claim:
    """An event was published if, and only if, its row was committed; some came twice, with the same id."""
    came = [e for e in evidence.log if e["decision"] == "event"]
    wrong = sorted({e["about"] for e in came} ^ set(evidence.pushed))
    again = len(came) - len({e["id"] for e in came})
    result = f"{len(came) - again} for {len(evidence.pushed)} rows ({again} came again, with the same id)"
    return Claim("Events at the webhook, one for each row", result + _named(wrong, "lost or made up"), not wrong)


def _order(log: Sequence[Mapping[str, Any]]) -> Claim:
    """Within an account each event came first after the one before it."""
    last: Counter[str] = Counter()
    wrong = []
    for e in log:
        if e["decision"] == "event" and e["number"] > last[e["account"]]:
            if e["number"] != last[e["account"]] + 1:
                wrong.append(f"{e['account']} {e['number']}")
            last[e["account"]] = e["number"]
    return Claim("Events out of order within an account", f"{len(wrong)}" + _named(wrong, "too early"), not wrong)


def _undeclared(evidence: Evidence) -> Claim:
    """Few requests were spent on finding the limit, and what they taught is about the limit."""
    decisions = Counter(e["decision"] for e in evidence.log if e.get("account") == UNDECLARED and "endpoint" in e)
    refused, rate = decisions["throttled"], evidence.learnt
    result = f"{refused} of {decisions.total()}, " + (
        "nothing learnt" if rate is None else f"learnt {rate:.1f}/s where {evidence.allowed:g}/s are allowed"
    )
    return Claim(
        f"Requests refused by {PROVIDER}/{UNDECLARED}, whose limit nobody declared: at most {MOST_REFUSED}",
        result,
        refused <= MOST_REFUSED and (rate is None or rate <= evidence.allowed * FAR),
    )


def _facts(log: Sequence[Mapping[str, Any]], jobs: Sequence[JobView]) -> tuple[str, ...]:
    decisions = Counter(e["decision"] for e in log)
    dialects = sorted({e["dialect"] for e in log if "dialect" in e})
    spoken = ": " + ", ".join(dialects) if dialects else ""
    rescued = sum(job.rescues for job in jobs)
    facts = [
        f"{sum('contact' in e for e in log)} requests reached the provider for {len(jobs)} jobs",
        f"{decisions['throttled']} answers were 429, in {len(dialects)} dialects{spoken}",
        f"{decisions['unavailable']} answers were 503, then the port was closed",
        f"{decisions['repeated']} requests repeated one whose answer was lost; their keys were recognised",
        f"{decisions['unauthorised']} requests met an expired token; they were repeated with a new one",
        f"{rescued} executions were cut off by the kill; their jobs were rescued",
    ]
    facts += [f"the webhook was away for {back - away:.1f} s" for away, back in _absences(log)]
    return tuple(facts)


def _absences(log: Sequence[Mapping[str, Any]]) -> Iterable[tuple[float, float]]:
    went, came = ([e["t"] for e in log if e["decision"] == what] for what in ("sink_away", "sink_back"))
    return zip(went, came, strict=False)


def _named(culprits: Sequence[str], what: str) -> str:
    """The first few culprits, or nothing."""
    if not culprits:
        return ""
    more = f" and {len(culprits) - _SHOWN} more" if len(culprits) > _SHOWN else ""
    return f"; {what}: {', '.join(culprits[:_SHOWN])}{more}"
