"""Which addresses are public, however they are written."""

import pytest

from resilient.core.base.hosts import denied, is_address, is_private


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",  # noqa: S104
        "169.254.169.254", "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1",
        "224.0.0.1", "255.255.255.255", "192.88.99.1", "203.0.113.7", "::1", "::", "::127.0.0.1",
        "::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1",
        "2002:7f00:1::", "2001::1", "2001:db8::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0",
        "fec0::1", "ff02::1", "100::1", "5f00::1", "3fff::1", "nonsense", "",
    ],
)  # fmt: skip
def test_nothing_is_sent_to_what_is_not_plainly_public(address):
    assert denied(address) is True


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8", "1.1.1.1", "172.15.255.255", "172.32.0.1", "100.63.255.255", "100.128.0.1", "169.253.1.1",
        "192.167.1.1", "2606:4700::1111", "2a00:1450:4001:80b::200e", "2001:4860:4860::8888", "2606:4700::1111%eth0",
    ],
)  # fmt: skip
def test_the_addresses_beside_those_are_public(address):
    assert denied(address) is False


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("LocalHost.", True),
        ("a.localhost", True),
        ("db.internal", True),
        ("DB.Internal", True),
        ("printer.local", True),
        ("db", True),  # a name without a dot is one of the network's own
        ("127.0.0.1", True),
        ("127.0.0.1.", True),
        ("10.0.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("[FE80::1%eth0]", True),
        ("8.8.8.8", False),
        ("8.8.8.8.", False),
        ("[2606:4700::1111]", False),
        ("2606:4700::1111", False),
        ("api.example.com", False),
        ("api.example.com.", False),
        ("localhost.example.com", False),
        ("notlocalhost.example", False),
        ("internal.example.com", False),
        ("local.example.com", False),
        ("a.localX", False),
    ],
)
def test_a_host_is_private_by_its_address_or_its_name(host, is_own):
    assert is_private(host) is is_own


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("8.8.8.8", True), ("127.0.0.1", True), ("::1", True), ("[::1]", True), ("fe80::1%eth0", True),
        ("[fe80::1%eth0]", True), ("api.example.com", False), ("8.8.8.8.example.com", False), ("8.8.8", False),
        ("8.8.8.8X", False), ("X8.8.8.8", False),
        ("", False),
    ],
)  # fmt: skip
def test_an_address_is_told_from_a_name(host, expected):
    assert is_address(host) is expected
