"""What a resource is allowed: limits, concurrency, breaker thresholds, chosen by key pattern.

Owns the declarations and their choice, knows no state. The most specific pattern wins for each aspect by
itself (limits, concurrency, breaker); its limits replace those of broader patterns. A resource's row may
override aspects at runtime (`override`, a JSON object made by `Policy.to_json`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal

from resilient.core.base.errors import InvalidInput
from resilient.core.base.misfit import explained_class, is_number, is_whole
from resilient.core.base.resource_key import check_pattern, is_budget, matches, path
from resilient.core.gates.rate_limit import Limit

if TYPE_CHECKING:
    from collections.abc import Sequence


_PLACEHOLDER: Final = re.compile(r"\{\w+\}")
_SCHEME: Final = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")


class Tenancy(StrEnum):
    """What the accounts of one root have in common, and so what one of them may say about the others.

    Accounts of one API on the same hosts fall ill together: what enough of them report is true of all. An account with
    a host of its own says less, because whoever connected it may have chosen that host, and runs it:

                    no answer at all    an answer (5xx, throttle, budget, cost)
        SHARED      root                root
        SUBDOMAIN   account             root      `https://{shop}.shop.example`, or one of the hosts the facts list
        APART       account             account   `https://{homeserver}`: wherever the account says

    "root" means that it may count there, beside what others report (`breaker`), not that it decides.
    """

    SHARED = "shared"
    SUBDOMAIN = "subdomain"
    APART = "apart"


def tenancy_of(address: str, *, confined: bool = False) -> Tenancy:
    """What accounts share whose address follows this template (`Provider.base_url`).

    ``confined``: an account's host must be one of those that the provider's facts list.
    """
    authority = re.split(r"[/?#]", _SCHEME.sub("", address))[0]
    if "{" not in authority:
        return Tenancy.SHARED
    fixed = _PLACEHOLDER.split(authority)[-1]  # what follows the last placeholder is the provider's
    return Tenancy.SUBDOMAIN if confined or (fixed.startswith(".") and "." in fixed[1:]) else Tenancy.APART


LEAST_CHILDREN, MOST_CHILDREN = 2, 16  # accounts whose failures may open a provider's circuit; the most remembered
_MOST_SECONDS: Final = 1e9  # 31 years; far beyond it dates end
_MOST_KEYS: Final = 65536  # keys whose choice is remembered


@explained_class
@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a circuit opens, for how long, and how it comes back. Times are in seconds.

    Opens on ``streak`` failures in a row, or when ``ratio`` of at least ``volume`` requests within ``window``
    failed; None switches either off. A provider's own circuit also needs failures from at least ``children``
    distinct accounts, and no fewer than work (`breaker.ill_enough`). Open times begin at ``first_open``, double up to
    ``longest_open`` and come down a step per ``calm`` without trouble; up to half is added as jitter, within
    ``longest_open``. After closing, ``ramp_first`` jobs run at once, doubling ten times within
    ``ramp``.
    """

    streak: int | None = 5
    ratio: float | None = 0.5
    volume: int = 20
    window: float = 60.0
    children: int = 3
    first_open: float = 15.0
    longest_open: float = 600.0
    probe_lease: float = 60.0
    calm: float = 60.0
    ramp: float = 30.0
    ramp_first: int = 2

    def __post_init__(self) -> None:
        for name in ("volume", "children", "ramp_first", "streak"):
            value = getattr(self, name)
            self._require(name, value is None or is_whole(value), "a count from 1")
        for name in ("window", "first_open", "longest_open", "probe_lease", "calm"):
            span = getattr(self, name)
            self._require(
                name, is_number(span) and 0 < span <= _MOST_SECONDS, "a positive number of seconds, at most 1e9"
            )
        fits = is_number(self.ramp) and 0 <= self.ramp <= _MOST_SECONDS
        self._require("ramp", fits, "a number of seconds from 0 to 1e9")
        fits = self.ratio is None or (is_number(self.ratio) and 0 < self.ratio <= 1)
        self._require("ratio", fits, "above 0 and at most 1")
        if not LEAST_CHILDREN <= self.children <= MOST_CHILDREN:
            raise InvalidInput(
                f"BreakerPolicy(children={self.children}): use {LEAST_CHILDREN} to {MOST_CHILDREN};"
                " one account never stops its provider, its own circuit does that work"
            )
        if self.first_open > self.longest_open:
            raise InvalidInput(
                f"BreakerPolicy(first_open={self.first_open:g}, longest_open={self.longest_open:g}): a circuit cannot"
                " first be open for longer than it may be; raise longest_open too"
            )

    def _require(self, name: str, fits: bool, what: str) -> None:  # noqa: FBT001 - of the value
        if not fits:
            raise InvalidInput(f"BreakerPolicy({name}={getattr(self, name)!r}): {name} is {what}")


@dataclass(frozen=True, slots=True)
class Learning:
    """Whether throttles teach a limit, and between which rates.

    ``learn=False``: they only make the resource rest. ``learn=(0.5, 50)``: requests a second, at least and at most.
    ``learn="concurrency"``: every throttle means too many requests at once; ``learn="rate"``: none means that.
    ``learn="latency"``: answers that take twice as long as usual teach too.
    """

    on: bool = True
    bounds: tuple[float, float] | None = None
    slots: bool | None = None
    latency: bool = False

    @classmethod
    def of(cls, pattern: str, word: Any) -> Learning:
        """What was declared for a pattern. Raises `InvalidInput`."""
        if isinstance(word, bool):
            return cls(on=word)
        if word == "latency":
            return cls(latency=True)
        if word in ("concurrency", "rate"):
            return cls(slots=word == "concurrency")
        if isinstance(word, tuple) and len(word) == _BOTH and all(is_number(x) for x in word):
            least, most = float(word[0]), float(word[1])
            if 0 < least <= most:
                return cls(bounds=(least, most))
        raise InvalidInput(
            f"learn={{{pattern!r}: {word!r}}}: write False, (0.5, 50) in requests a second, 'rate',"
            " 'concurrency' or 'latency'"
        )


Pace = Literal["even"]
_BOTH: Final = 2


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything one resource key is allowed."""

    limits: tuple[Limit, ...] = ()
    concurrency: int | None = None
    breaker: BreakerPolicy = BreakerPolicy()
    learn: Learning = Learning()
    pace: Pace | None = None
    reserve: tuple[tuple[int, float], ...] = ()  # (priority, share of a window kept for it and above)
    job_limits: tuple[Limit, ...] = field(init=False, repr=False, compare=False, default=())
    request_limits: tuple[Limit, ...] = field(init=False, repr=False, compare=False, default=())
    plain: bool = field(init=False, repr=False, compare=False, default=True)  # no limit, no cap

    def __post_init__(self) -> None:
        if self.concurrency is not None and not is_whole(self.concurrency):
            raise InvalidInput(f"a concurrency cap starts at 1, not {self.concurrency!r}; to stop a resource, pause it")
        names = [limit.name for limit in self.limits]
        if len(set(names)) != len(names):
            raise InvalidInput(f"two limits of one resource share a name ({', '.join(names)}): give them names")
        object.__setattr__(self, "job_limits", tuple(x for x in self.limits if x.counts == "jobs"))
        object.__setattr__(self, "request_limits", tuple(x for x in self.limits if x.counts == "requests"))
        object.__setattr__(self, "plain", not self.limits and self.concurrency is None and not self.reserve)

    def kept_from(self, priority: int) -> float:
        """The share of a window that is kept for jobs of a higher priority than this."""
        return sum(share for least, share in self.reserve if least > priority)

    def to_json(self) -> dict[str, Any]:
        """All aspects as a JSON object; drop members to override only the others."""
        return {
            "limits": [limit.to_json() for limit in self.limits],
            "concurrency": self.concurrency,
            "breaker": asdict(self.breaker),
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Policy:
        """Read what `to_json` wrote."""
        return cls().overridden(doc)

    def stored(self, doc: Any) -> Policy:
        """This policy with the override of a row. Never raises, because it must not stop a worker.

        It was written long ago, by older or newer code, over another declaration, or by hand: a breaker's times and
        counts are brought within what they may be, and what cannot be read leaves the declared aspect as it is.
        """
        policy = self
        for name, value in doc.items() if isinstance(doc, Mapping) else ():
            with suppress(InvalidInput, TypeError, AttributeError, OverflowError):
                policy = policy.overridden({name: _possible(self.breaker, value) if name == "breaker" else value})
        return policy

    def overridden(self, doc: Mapping[str, Any]) -> Policy:
        """This policy with the aspects in ``doc`` replaced (members of ``breaker`` one by one).

        Raises `InvalidInput` for anything that is not an aspect, so that a typing error is not silently no limit.
        """
        if unknown := set(doc) - {"limits", "concurrency", "breaker"}:
            raise InvalidInput(f"a policy has limits, concurrency and breaker, not {', '.join(sorted(unknown))}")
        changes: dict[str, Any] = {}
        if "limits" in doc:
            changes["limits"] = tuple(Limit.from_json(one) for one in doc["limits"] or ())
        if "concurrency" in doc:
            changes["concurrency"] = doc["concurrency"]
        if "breaker" in doc:
            try:
                members = dict(doc["breaker"] or {})
                changes["breaker"] = replace(self.breaker, **members)
            except TypeError:
                names = [item.name for item in fields(BreakerPolicy)]
                wrong = ", ".join(repr(name) for name in doc["breaker"] if name not in names)
                raise InvalidInput(f"a breaker policy has no {wrong}, only {', '.join(names)}") from None
        return replace(self, **changes)


class Policies:
    """The policies of one app, by key pattern.

    ``limits={"github/*": [Limit(5000, per="1h")]}``, ``concurrency={"github": 8}``, ``breakers={"github/**":
    ...}``; ``tenancies`` by root, `SHARED` where nothing is said. ``pace={"crm/*": "even"}`` spreads what a
    provider says is left over the time until its reset; ``reserve={"crm/*": {5: 0.2}}`` keeps a fifth of each such
    window for jobs of priority 5 and above. ``usual``: caps by key, where no pattern of ``concurrency`` matches.
    Raises `InvalidInput` or `BadResourceKey` for a declaration that makes no sense.
    """

    def __init__(
        self,
        limits: Mapping[str, Sequence[Limit]] | None = None,
        concurrency: Mapping[str, int] | None = None,
        breakers: Mapping[str, BreakerPolicy] | None = None,
        tenancies: Mapping[str, Tenancy] | None = None,
        learn: Mapping[str, Any] | None = None,
        pace: Mapping[str, Pace] | None = None,
        reserve: Mapping[str, Mapping[int, float]] | None = None,
        usual: Mapping[str, int] | None = None,
    ) -> None:
        self._tenancies = tenancies or {}
        self._limits = _sorted({pattern: _declared(pattern, value) for pattern, value in (limits or {}).items()})
        self._caps, self._usual = _sorted(concurrency or {}), usual or {}
        self._breakers = _sorted(breakers or {})
        self._learn = _sorted({pattern: Learning.of(pattern, word) for pattern, word in (learn or {}).items()})
        self._pace = _sorted({pattern: _paced(pattern, word) for pattern, word in (pace or {}).items()})
        self._reserve = _sorted({pattern: _reserved(pattern, value) for pattern, value in (reserve or {}).items()})
        for _, value in self._limits:
            Policy(limits=value)  # refuse a bad declaration at start-up, not at its first key
        for _, cap in self._caps:
            Policy(concurrency=cap)
        for pattern, breaker in self._breakers:
            if not isinstance(breaker, BreakerPolicy):
                raise InvalidInput(f"the breaker of {pattern!r} is {breaker!r}: write BreakerPolicy(streak=5)")
        self._by_key: dict[str, Policy] = {}
        self._shared: dict[tuple[Any, ...], Policy] = {}  # by its members: keys of one pattern share one object

    @property
    def roots(self) -> frozenset[str]:
        """The first segments that its patterns spell out."""
        every = (self._limits, self._caps, self._breakers, self._learn, self._pace, self._reserve)
        roots = {pattern.partition("/")[0] for by_pattern in every for pattern, _ in by_pattern}
        return frozenset(root for root in roots if not set(root) & set("*?"))

    def for_key(self, key: str, override: Mapping[str, Any] | None = None) -> Policy:
        """The policy of ``key``, with its row's ``override``."""
        if override:
            return self._choose(key).stored(override)
        return self._by_key.get(key) or self._choose(key)

    def tenancy(self, key: str) -> Tenancy:
        """What the accounts below the root of ``key`` have in common."""
        return self._tenancies.get(key.partition("/")[0], Tenancy.SHARED)

    def capped(self, key: str) -> tuple[str, ...]:
        """The keys of a path with a declared concurrency cap."""
        if not self._caps and not self._usual:
            return ()
        return tuple(level for level in path(key) if self.for_key(level).concurrency is not None)

    def _choose(self, key: str) -> Policy:
        taught_by = key.rpartition("/")[0] if is_budget(key) else key  # `learn=` patterns name accounts
        members = (
            _best(key, self._limits) or (),
            _best(key, self._caps) or self._usual.get(key),
            _best(key, self._breakers) or _BREAKER,
            _best(key, self._learn) or _best(taught_by, self._learn) or _LEARNING,
            _best(key, self._pace),
            _best(key, self._reserve) or (),
        )
        if (policy := self._shared.get(members)) is None:
            policy = self._shared[members] = Policy(*members)
        if len(self._by_key) >= _MOST_KEYS:
            self._by_key.clear()
        self._by_key[key] = policy
        return policy


_BREAKER: Final = BreakerPolicy()
_LEARNING: Final = Learning()


def _possible(breaker: BreakerPolicy, override: Mapping[str, Any] | None) -> dict[str, Any]:
    """An override's members brought within what they may be beside the others; those of newer code are left out."""
    names = {item.name for item in fields(BreakerPolicy)}
    members = {name: value for name, value in (override or {}).items() if name in names}
    if "children" in members:
        members["children"] = min(MOST_CHILDREN, max(LEAST_CHILDREN, members["children"]))
    first, longest = (members.get(name, getattr(breaker, name)) for name in ("first_open", "longest_open"))
    return members | ({"longest_open": first} if first > longest else {})


def _declared(pattern: str, value: Any) -> tuple[Limit, ...]:
    limits = tuple(value) if isinstance(value, Iterable) else ()
    if not isinstance(value, Iterable) or not all(isinstance(one, Limit) for one in limits):
        raise InvalidInput(f"the limits of {pattern!r} are {value!r}: write [Limit(5000, per='1h')]")
    return limits


def _paced(pattern: str, word: Any) -> Pace:
    if word != "even":
        raise InvalidInput(f"pace={{{pattern!r}: {word!r}}}: write 'even', or leave it out")
    return "even"


def _reserved(pattern: str, shares: Any) -> tuple[tuple[int, float], ...]:
    items = sorted(shares.items()) if isinstance(shares, Mapping) else []
    whole = all(isinstance(least, int) and isinstance(share, (int, float)) and share > 0 for least, share in items)
    if not items or not whole or sum(share for _, share in items) >= 1:
        raise InvalidInput(f"reserve={{{pattern!r}: {shares!r}}}: write priorities and shares, such as {{5: 0.2}}")
    return tuple((least, float(share)) for least, share in items)


def _sorted(by_pattern: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Most specific first; of equals the one declared last."""
    checked = [(check_pattern(pattern), value) for pattern, value in by_pattern.items()]
    return sorted(checked, key=lambda item: _specificity(item[0]))[::-1]


def _specificity(pattern: str) -> tuple[int, ...]:
    """A literal segment before ``acct-*`` before ``*`` before ``**``, from the left."""
    return tuple(-1 if s == "**" else 0 if s == "*" else 1 if "*" in s or "?" in s else 2 for s in pattern.split("/"))


def _best(key: str, by_pattern: Sequence[tuple[str, Any]]) -> Any:
    return next((value for pattern, value in by_pattern if matches(key, pattern)), None)
