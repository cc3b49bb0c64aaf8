"""Which hosts a provider's credentials may go to.

An origin is scheme, host and port. A host written alone means HTTPS on its default port; ``*.example.com``
means every host below example.com, never example.com itself. HTTP is for origins that say so (a test server
on this machine).
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, NamedTuple
from urllib.parse import unquote_plus

from resilient.core.base.errors import InvalidInput
from resilient.core.base.phrases import one_line

# -- addresses --------------------------------------------------------------------------------------------------------
#
# Which addresses are public: nothing that a stranger chose is connected to at any other.
#
# A tenant who names a host chooses what our network resolves and calls: without a guard that is a door to what stands
# beside us (https://owasp.org/www-community/attacks/Server_Side_Request_Forgery).
#
# The list is our own: Python's ``is_global`` is true for addresses that may lead into a private network (NAT64, 6to4,
# IPv4 within IPv6), and differs between versions. What is not plainly public is refused.

# https://www.iana.org/assignments/iana-ipv4-special-registry and its IPv6 twin.
DENIED: Final = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, and the metadata services of the clouds
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24",
        "192.168.0.0/16", "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "168.63.129.16/32",  # Azure's host agent
        "224.0.0.0/4", "240.0.0.0/4",
        # IPv6: only 2000::/3 is given out, so everything outside of it is refused as a whole.
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32", "2002::/16",  # 6to4: an IPv4 address in disguise
        "2620:4f:8000::/48", "3fff::/20",
    )
)  # fmt: skip
_ALLOCATED: Final = ip_network("2000::/3")


def denied(address: str) -> bool:
    """Whether nothing may be sent to an address."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return _denied(ip) or (isinstance(ip, IPv6Address) and ip not in _ALLOCATED)


def _denied(ip: IPv4Address | IPv6Address) -> bool:
    return any(ip.version == net.version and ip in net for net in DENIED)


def is_private(host: str) -> bool:
    """Whether a host is written as an address that is not public, or is this machine by name.

    Where most names lead is known only once they are resolved: the address is checked then, too.
    """
    name = host.rstrip(".").lower()
    if not is_address(name):
        return name == "localhost" or name.endswith((".localhost", ".internal", ".local")) or "." not in name
    return denied(name.strip("[]"))


def is_address(host: str) -> bool:
    """Whether a host is written as an IP address, not as a name."""
    try:
        ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


# -- hosts ------------------------------------------------------------------------------------------------------------

Origin = tuple[str, str, int]
PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"(?:\*\.)?[A-Za-z0-9_.-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?")
_MOST_REMEMBERED: Final = 1024
_URL: Final = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[^?#]*)?(?:[?#]|\Z)",
    re.IGNORECASE,
)
_UNREADABLE: Final = re.compile(r"[\\\s\x00-\x20\x7f-\xa0\ud800-\udfff]")
_HIGHEST_PORT: Final = 65_535
_SHOWN: Final = 300  # characters of a refused URL
_WORD: Final = re.compile(r"(\s+)")
_ENDS: Final = re.compile(r"[/?#]")  # what ends a host, unless it belongs to a password
_PLACE: Final = re.compile(r"(?:[A-Za-z0-9._~-]*|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_WEB: Final = ("http", "https")
_FILES: Final = ("sqlite", "file", "duckdb")  # what follows is a path: nobody logs in there
_SERVERS: Final = re.compile(r",(?=[a-z][a-z0-9+.-]{1,30}://)", re.IGNORECASE)  # NATS has lists of addresses
_SERVER: Final = re.compile(r"[a-z0-9+.-]{2,31}://(?:[a-z0-9._~-]*|\[[0-9a-f:.]+\])(?::\d{1,5})?/?", re.IGNORECASE)


class Address(NamedTuple):
    """The parts of an absolute HTTP URL; ``host`` in small letters, an IPv6 address without its brackets."""

    scheme: str
    host: str
    port: int | None
    path: str


def address(url: str) -> Address:
    """Take an absolute HTTP URL apart, the one way in which every client reads it. Raises `InvalidInput`.

    Clients disagree about the rest (backslashes, tabs, users, letters beyond ASCII in a host), so that a URL which was
    judged as one host would be sent to another. Such a URL is refused.
    """
    match = _URL.match(url)
    port = int(match["port"]) if match is not None and match["port"] else None
    if match is None or _UNREADABLE.search(url) or (port is not None and not 0 < port <= _HIGHEST_PORT):
        raise InvalidInput(
            f"{one_line(without_secrets(url[:_SHOWN]))!r} is no absolute URL of an API: write 'https://api.example.com/v1',"
            " with a host of ASCII letters, and without user, backslash or blank"
        )
    host = match["host"].lower()
    return Address(match["scheme"].lower(), host.strip("[]"), port, match["path"] or "/")


def origin_of(url: str) -> Origin:
    """The origin of an absolute HTTP URL. Raises `InvalidInput`."""
    scheme, host, port, _ = address(url)
    return scheme, host, port or PORTS[scheme]


def host_pattern(text: str) -> Origin:
    """A declared host as an origin, in which the host may start with ``*.``. Raises `InvalidInput`."""
    if "://" in text:
        return origin_of(text)
    if not _HOST.fullmatch(text):
        raise InvalidInput(f"{text!r} is no host: write 'api.example.com', '*.example.com' or 'http://127.0.0.1:8000'")
    scheme, host, port = origin_of(f"https://{text.removeprefix('*.')}")
    return scheme, "*." + host if text.startswith("*.") else host, port


def without_secrets(url: str) -> str:
    """A URL for people: without user, password, fragment and the values of its query, of which one may have no name."""
    if url.startswith("//"):  # its scheme is that of the page before
        return without_secrets(f"http:{url}").removeprefix("http:")
    head, query, rest = _without_logins(url).partition("?")
    scheme, separator, tail = head.partition("://")
    if separator:
        authority, slash, path = tail.partition("/")
        head = f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"
    if not query:
        return head.partition("#")[0]
    parts = [part.partition("=") for part in rest.partition("#")[0].split("&") if part]
    # what ends in a sign alone may be a value in Base64 that has no name
    return f"{head}?{'&'.join(f'{name}=…' if value.strip('=') else '…' for name, _, value in parts)}"


def _without_logins(text: str) -> str:
    """Each word of ``text`` without user and password; an address of a database is one word, whatever is in it."""
    if "@" not in text or "://" not in text:
        return text
    scheme, _, rest = text.partition("://")
    if scheme.lower() not in _WEB and not _WORD.search(scheme):
        if scheme.lower().partition("+")[0] in _FILES and rest.startswith("/"):
            return text
        servers = _SERVERS.split(text)
        is_list = all("@" in one or _SERVER.fullmatch(one) for one in servers)
        return ",".join(map(_without_login, servers)) if is_list else _without_login(text)
    return "".join(_without_login(word) for word in _WORD.split(text))  # with the blanks between them


def _without_login(word: str) -> str:
    """A word without user and password, which may hold what ends a host.

    Where it can be read in two ways (``postgresql://u:p@w?x=y@host``), nothing behind that ``://`` is kept. An address
    of the web may have an ``@`` in its path, and other addresses within it.
    """
    kept, at, last, begin = list[str](), 0, word.rfind("@"), word.find("://")
    while 0 <= begin < last:
        place = begin + 3
        match = _ENDS.search(word, place)
        end = len(word) if match is None else match.start()
        sign = word.rfind("@", place, end)
        is_first, is_web = at == 0, word[at:begin].lower().endswith(_WEB)
        is_place = _PLACE.fullmatch(word, max(sign + 1, place), end) is not None
        kept.append(word[at:place])
        at = place
        if last < end:  # the only way to read it
            at = sign + 1 if is_first or ":" in word[place:sign] else place
            break
        if sign < 0 and is_web and is_place:
            begin = word.find("://", place)
        elif sign < 0 and not is_place and word.find("@", end) == last:
            at = last + 1
            break
        else:
            return "".join(kept) + "…"
    return "".join(kept) + word[at:]


def without_params(url: str, names: frozenset[str]) -> str:
    """``url`` without some parameters of its query: those that carry a key."""
    head, mark, rest = url.partition("?")
    if not mark or not names:
        return url
    query, hash_, fragment = rest.partition("#")
    kept = [part for part in query.split("&") if unquote_plus(part.partition("=")[0]) not in names]
    return head + ("?" + "&".join(kept) if kept else "") + hash_ + fragment


class Origins:
    """A set of origins and patterns. ``declared`` is false for an empty set, which says nothing about any origin."""

    __slots__ = ("_answers", "_exact", "_patterns", "declared")

    def __init__(self, exact: frozenset[Origin], patterns: tuple[Origin, ...]) -> None:
        self._exact, self._patterns = exact, patterns
        self._answers: dict[Origin, bool] = {}
        self.declared = bool(exact or patterns)

    @classmethod
    def of(cls, name: str, base_url: str, hosts: tuple[str, ...], own: str = "") -> Origins:
        """The declared origins; ``own`` is the account's own base URL (see `Provider.origins`)."""
        listed = [host_pattern(host) for host in hosts] + ([origin_of(base_url)] if base_url else [])
        patterns = tuple(o for o in listed if o[1].startswith("*."))
        exact = frozenset(o for o in listed if not o[1].startswith("*."))
        if not own:
            return cls(exact, patterns)
        account_origin = origin_of(own)
        if listed and not cls(exact, patterns).holds(*account_origin):
            raise InvalidInput(
                f"{without_secrets(own)!r} is not among the hosts of provider {name!r}"
                f" ({', '.join(hosts) or base_url}): declare its host, or credentials would go to a stranger"
            )
        return cls(exact | {account_origin}, ())

    def holds(self, scheme: str, host: str, port: int | None) -> bool:
        """Whether a request to there may carry credentials."""
        origin = (scheme, host.lower(), port or PORTS.get(scheme, 0))
        is_member = self._answers.get(origin)
        if is_member is None:
            is_member = origin in self._exact or any(
                origin[0] == s and origin[2] == p and origin[1].endswith(h[1:]) for s, h, p in self._patterns
            )
            if len(self._answers) < _MOST_REMEMBERED:
                self._answers[origin] = is_member
        return is_member
