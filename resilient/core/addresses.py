"""Which addresses are public: nothing that a stranger chose is connected to at any other.

A tenant who names a host chooses what our network resolves and calls: without a guard that is a door to what stands
beside us (https://owasp.org/www-community/attacks/Server_Side_Request_Forgery).

The list is our own: Python's ``is_global`` says yes to addresses that lead home by a detour (NAT64, 6to4, IPv4 within
IPv6), and its opinion changes with its version. What is not plainly public is refused.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

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
_GIVEN_OUT: Final = ip_network("2000::/3")


def denied(address: str) -> bool:
    """Whether nothing may be sent to an address."""
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return _denied(ip) or (isinstance(ip, IPv6Address) and ip not in _GIVEN_OUT)


def _denied(ip: IPv4Address | IPv6Address) -> bool:
    return any(ip.version == net.version and ip in net for net in DENIED)


def is_private(host: str) -> bool:
    """Whether a host is written as an address that is not public, or is this machine by name.

    Most names are only known when they are resolved: what is connected to is checked then, too.
    """
    name = host.rstrip(".").lower()
    try:
        ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return name == "localhost" or name.endswith((".localhost", ".internal", ".local")) or "." not in name
    return denied(name.strip("[]"))
