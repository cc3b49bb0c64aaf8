"""The cast: which connected account has which trouble, and when; and the contacts that go through them.

The provider (its server side) and the screen read this; the engine under test is told nothing of it.
Accounts that are not listed here are healthy.
"""

from __future__ import annotations

import csv
import random
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

from resilient.core.base.errors import BadResourceKey, SetupError
from resilient.core.base.resource_key import check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PROVIDER: Final = "crm"
CLIENT_ID: Final = "resilient-demo"  # a public client: PKCE stands in for its secret
SINK: Final = "search"  # a destination of events
HEALTHY: Final = "acme"
THROTTLED: Final = "globex"
DOWN: Final = "initech"
LIMITED: Final = "umbrella"
REVOKED: Final = "hooli"
UNDECLARED: Final = "vandelay"
ENDPOINT: Final = "contacts"
LIMITED_ENDPOINT: Final = "leads"
STORIES: Final = {
    HEALTHY: "healthy, but one answer never comes",
    THROTTLED: "throttled: 429 in five dialects",
    DOWN: "goes down: 503, then nobody listens",
    LIMITED: f"its {LIMITED_ENDPOINT} are limited, the rest flows",
    REVOKED: "its owner takes the access back, and gives it again",
    UNDECLARED: "takes so many a second, and tells nobody how many",
}


def story(key: str) -> str:
    """The trouble of a resource, in a few words."""
    if key == f"outbox/{SINK}":
        return "events to a webhook that is away for a while"
    return STORIES.get(key.split("/")[1], "healthy") if key.count("/") == 1 else "its endpoint"


def resource_key(account: str, endpoint: str) -> str:
    """``crm/acme`` for contacts, one level deeper for other endpoints: each can be stopped on its own."""
    return f"{PROVIDER}/{account}" + ("" if endpoint == ENDPOINT else f"/{endpoint}")


@dataclass(frozen=True, slots=True)
class Plan:
    """When troubles begin (counted in stored contacts of the account) and how long they last (seconds)."""

    burst: int = 32  # requests the throttled account may send before it must wait
    endpoint_burst: int = 24  # the same for the limited endpoint
    wait: float = 1.0  # how long
    allowed: int = 5  # requests a second of the account whose limit nobody declared
    down_after: int = 50
    unavailable: float = 1.5  # 503
    unavailable_least: int = 6  # requests in a row that get it, however slow the machine is: so many open a circuit
    refused: float = 2.5  # then nobody listens
    silent_after: int = 40  # the healthy account's next request is stored and never answered
    latency: float = 0.12  # of a good answer, give or take half
    token_stated: float = 6.0  # seconds that an access token's answer states
    token_life: float = 4.5  # seconds after which it is refused
    revoke_after: int = 20  # the account's owner takes the access back
    consent_after: float = 1.5  # seconds until he has read that he must connect again, and did
    outage_after: int = 600  # all accounts' contacts; then the whole provider answers 503
    outage: float = 1.6
    sink_away_after: int = 150  # events
    sink_away: float = 3.0
    people: int = 120  # records of each account that are read in

    def to_json(self) -> dict[str, Any]:
        """For the provider's command line."""
        return asdict(self)


def plan(accounts: Iterable[tuple[str, str]], **changes: Any) -> Plan:
    """Troubles that fit the number of contacts (pairs of account and endpoint), so that each of them occurs.

    The throttled account must wait at least five times, once for each dialect, if it has ten contacts or
    more.
    """
    count = Counter(accounts)
    throttled = sum(n for (account, _), n in count.items() if account == THROTTLED)
    sizes: dict[str, Any] = {
        "burst": max(1, throttled * 2 // 11),
        "endpoint_burst": max(1, count[LIMITED, LIMITED_ENDPOINT] // 4),
        "down_after": sum(n for (account, _), n in count.items() if account == DOWN) // 4,
        "unavailable_least": min(6, sum(n for (account, _), n in count.items() if account == DOWN)),
        "silent_after": sum(n for (account, _), n in count.items() if account == HEALTHY) // 8,
        "revoke_after": sum(n for (account, _), n in count.items() if account == REVOKED) // 3,
        "outage_after": count.total() * 6 // 10,
        "sink_away_after": max(1, count.total() * 15 // 100),
    }
    return Plan(**(sizes | changes))


# -- contacts ---------------------------------------------------------------------------------------------------------
#
# Contacts: read from a CSV file, or made up (the same ones every time).
#
# A file needs the columns ``name`` and ``email``; ``id`` (default: the line), ``account`` (default: the demo's accounts
# in turn) and ``endpoint`` (default: contacts) may be there too, others are left alone. A line that cannot be a contact
# is reported with its number and left out; whether an e-mail address is good is the provider's business.

COLUMNS: Final = ("id", "account", "endpoint", "name", "email")
_REQUIRED: Final = {"name", "email"}
_IN_TURN: Final = tuple(STORIES)
_CHECKOUT: Final = Path(__file__).parents[3] / "examples" / "data" / "contacts.csv"
# Made-up contacts: how many per account and endpoint, and how many have an impossible address.
_SHARES: Final = (
    (HEALTHY, ENDPOINT, 240),
    (THROTTLED, ENDPOINT, 180),
    (DOWN, ENDPOINT, 200),
    (LIMITED, ENDPOINT, 160),
    (REVOKED, ENDPOINT, 60),
    (UNDECLARED, ENDPOINT, 60),
    (LIMITED, LIMITED_ENDPOINT, 100),
)
_INVALID: Final = 12
_SEED: Final = 20
_FIRST: Final = (
    *("Ada", "Alan", "Barbara", "Claude", "Donald", "Edsger", "Frances", "Grace", "Hedy"),
    *("Joan", "Katherine", "Ken", "Leslie", "Radia", "Tony"),
)
_LAST: Final = (
    *("Abbe", "Bosch", "Curie", "Dirac", "Euler", "Fermi", "Gauss", "Hertz", "Joule"),
    *("Kepler", "Laplace", "Meitner", "Noether", "Planck", "Tesla"),
)
_BROKEN: Final = ("{0}.example.com", "{0}@", "@example.com", "{0}@example", "{0} at example.com", "n/a")


class Contact(BaseModel):
    """What one job carries."""

    id: str
    account: str
    endpoint: str = ENDPOINT
    name: str
    email: str

    @property
    def resource_key(self) -> str:
        """What the job goes through."""
        return resource_key(self.account, self.endpoint)


@dataclass(frozen=True, slots=True)
class Contacts:
    """The content of a file: good contacts, and what is wrong with which line."""

    source: Path
    good: list[Contact]
    bad: list[str]

    @property
    def accounts(self) -> list[str]:
        """Whose contacts they are."""
        return sorted({c.account for c in self.good})

    @property
    def read_in(self) -> list[str]:
        """Whose records are read in: not those of the one that is there for its rate, which is shown at its pushes."""
        return [account for account in self.accounts if account != UNDECLARED]


def find(path: Path | None, scratch: Path) -> Path:
    """The file to read: ``path``, else a checkout's example, else the same contacts written to ``scratch``."""
    if path is not None:
        return path
    return _CHECKOUT if _CHECKOUT.exists() else write(scratch / "contacts.csv")


def read(path: Path) -> Contacts:
    """Read ``path``; raises `SetupError` if it is no such file or holds no contact at all."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            columns = {name.strip().lower() for name in rows.fieldnames or ()}
            if missing := _REQUIRED - columns:
                raise SetupError(
                    f"{path}, line 1: no column {' and no column '.join(sorted(missing))}; begin the file"
                    f" with a line such as {','.join(COLUMNS)}; name and email are needed"
                )
            good, bad = _sorted_out(rows)
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SetupError(f"{path} is not a CSV file in UTF-8: {error}") from None
    if not good:
        raise SetupError(f"{path} holds no contact" + (f"; the first problem: {bad[0]}" if bad else ""))
    return Contacts(path, good, bad)


def _sorted_out(rows: csv.DictReader[str]) -> tuple[list[Contact], list[str]]:
    good: list[Contact] = []
    bad: list[str] = []
    lines: dict[str, int] = {}
    for row in rows:
        cells = {(name or "").strip().lower(): value for name, value in row.items()}
        try:
            contact = _contact(cells, rows.line_num)
        except ValueError as error:  # BadResourceKey is one
            bad.append(f"line {rows.line_num}: {error}")
            continue
        if (first := lines.setdefault(contact.id, rows.line_num)) != rows.line_num:
            bad.append(f"line {rows.line_num}: id {contact.id!r} was already used in line {first}")
            continue
        good.append(contact)
    return good, bad


def _contact(cells: Mapping[str, Any], line: int) -> Contact:
    if any(value is None for value in cells.values()):
        raise ValueError("fewer fields than columns")
    if "" in cells:
        raise ValueError("more fields than columns")
    text = {name: str(value).strip() for name, value in cells.items()}
    if empty := [name for name in sorted(_REQUIRED) if not text[name]]:
        raise ValueError(f"no {' and no '.join(empty)}")
    account = text.get("account") or _IN_TURN[line % len(_IN_TURN)]
    contact = Contact(
        id=text.get("id") or f"line-{line}",
        account=account,
        endpoint=text.get("endpoint") or ENDPOINT,
        name=text["name"],
        email=text["email"],
    )
    try:
        check(contact.resource_key)
    except BadResourceKey:
        raise ValueError(
            f"account {account!r} or endpoint {contact.endpoint!r} has characters no key can have"
        ) from None
    return contact


def made_up() -> Iterator[Contact]:
    """A thousand synthetic contacts, a few of them with impossible addresses."""
    rng = random.Random(_SEED)  # noqa: S311 - the same contacts every time
    places = [(account, endpoint) for account, endpoint, n in _SHARES for _ in range(n)]
    rng.shuffle(places)
    invalid = set(rng.sample(range(len(places)), _INVALID))
    for n, (account, endpoint) in enumerate(places):
        name = f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"
        local = f"{name.lower().replace(' ', '.')}{n}"
        email = _BROKEN[n % len(_BROKEN)].format(local) if n in invalid else f"{local}@example.com"
        yield Contact(id=f"c{n + 1:04}", account=account, endpoint=endpoint, name=name, email=email)


def write(path: Path, contacts: Iterable[Contact] | None = None) -> Path:
    """Write contacts (default: the made-up ones) as CSV; returns ``path``."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows([getattr(c, name) for name in COLUMNS] for c in contacts or made_up())
    return path
