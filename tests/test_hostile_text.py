"""What strangers write is read in a time that grows with its length, and does nothing to terminals and logs.

A pattern that looks at each place again from each place before it takes sixteen times as long for four times the text;
one pass takes four times as long. CPU time is counted in plain passes of Python's over 8,000 characters and in four
readings of a quarter, measured in the same moment: a machine that does something else beside makes all of them slower.
"""

import importlib
import pkgutil
import re
import time
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import providers
import resilient
from resilient import Provider, Word
from resilient.core.base.bounds import SEARCHED_CODE
from resilient.core.base.budgets import budgets, parse_dictionary, parse_list
from resilient.core.base.hosts import without_secrets
from resilient.core.base.instants import http_date, read
from resilient.core.base.loggers import masked, urls
from resilient.core.base.phrases import in_json, one_line, plain
from resilient.core.gates.retry_after import in_text, when
from resilient.core.sync.paginators import links
from resilient.wire.requests import redact

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
LARGE = 8_000  # characters
QUICK = 0.01  # seconds of CPU that are not looked at further
GROWTH = 2  # times as long, at most, as four times a quarter of the text
TRIES = 25
NOTHING, MOST = 40, 1_500  # plain passes over so many: what is not looked at further, and what is never right
SEEDS = [
    " ", "\t", "a", "A", "0", "1.", "a.", ":", ";", ",", "=", '"', "'", "\\", '\\"', "<", ">", "/", "//", "://",
    "@", "?", "&", "#", "://a:", "http://a:", "a://b:c", "password=", "password='", 'secret="', "token: ",
    "Bearer ", "Bearer a", "Basic  ", "a=1;", "a;b", "<x>;a ", "<x>; rel=", '<x>;a="', "1m", "1h1m1s", "1,",
    "1, ", "retry after ", "try again in 1", "{", "[", "(", "((", "(b'", '(b"', "x,", "a b", "Mon, ", "é",
    "\x1b[", "\n", "\r\n", "wait 1d2", "10 of ", "limit 1 per ", "%41", "-", "_", "+", "*", "|", "$", "}",
]  # fmt: skip


def patterns():
    """Every pattern the engine and the providers' facts hold, by its text."""
    found = {}
    for package in (resilient, providers):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if any(part in info.name for part in (".migrations", ".demo", ".bench", ".testing", "__main__", ".child")):
                continue
            module = importlib.import_module(info.name)
            for name, value in ours(module):
                every = value if isinstance(value, tuple) else (value,)
                for one in every:
                    if isinstance(one, re.Pattern) and isinstance(one.pattern, str):
                        found.setdefault(one.pattern, (f"{info.name}.{name}", one))
                    elif isinstance(one, Provider):
                        facts(one, f"{info.name}.{name}", found)
            if callable(make := vars(module).get("provider")) and package is providers:
                try:
                    facts(make(), info.name, found)
                except TypeError:  # it wants credentials
                    facts(make(client_id="c", client_secret="s"), info.name, found)
    return found


def ours(module):
    """What a module has, without Django's settings: to look at these needs a project."""
    return [(name, one) for name, one in vars(module).items() if not type(one).__module__.startswith("django.")]


def facts(value, where, found):
    """The regular expressions among facts, however deep."""
    words = {"text", "code_text", "code_form", "made_up", "pattern", "timestamp_pattern"}
    if is_dataclass(value):
        for one in fields(value):
            held = getattr(value, one.name)
            if one.name in words and isinstance(held, str) and held:
                found.setdefault(held, (f"{where}: {type(value).__name__}.{one.name}", re.compile(held)))
            elif one.name == "header" and isinstance(held, dict):
                for pattern in held.values():
                    found.setdefault(pattern, (f"{where}: {type(value).__name__}.header", re.compile(pattern)))
            else:
                facts(held, where, found)
    elif isinstance(value, (tuple, list, frozenset)):
        for one in value:
            facts(one, where, found)
    elif isinstance(value, dict):
        for one in value.values():
            facts(one, where, found)


def cpu(work, text):
    began = time.thread_time()
    work(text)
    return time.thread_time() - began


def a_pass(text):
    return sum(map(ord, text))


def passes(work, text, tries=1):
    """How many plain passes over `LARGE` characters it costs: of several tries the one that was disturbed least."""
    return min(cpu(work, text) / min(cpu(a_pass, "a" * LARGE) for _ in range(3)) for _ in range(tries))


def grows(work, seed, part, tail):
    """Whether a text of so many characters costs far more than four of a quarter of it, which end alike.

    Both take as long, so that what disturbs one disturbs the other, and in turns. A disturbance only adds: the least of
    several is the cost, and what still looks slow is measured again until it is clear or has had its tries.
    """
    quarter = part // 4
    quarter -= (quarter - part) % len(seed)
    whole, fourth = (made_of(seed, length) + tail for length in (part, quarter))
    costs = []
    for _ in range(TRIES):
        costs.append(
            (cpu(work, whole), cpu(lambda text: [work(text) for _ in range(4)], fourth), cpu(a_pass, "a" * LARGE))
        )
        large, four, one_pass = map(min, zip(*costs, strict=True))
        if len(costs) >= TRIES // 5 and (large < NOTHING * one_pass or large < min(MOST * one_pass, GROWTH * four)):
            return False
    return True


def made_of(seed, length):
    return (seed * (length // len(seed) + 1))[:length]


def too_slow(work, size, tails=("", "!", "@")):
    """The first hostile text of a size that costs what only a second pass for each place costs."""
    for seed in SEEDS:
        for tail in tails:
            for part in (size // 8, size):  # the smaller first: what is worse than quadratic would never end
                if cpu(work, made_of(seed, part) + tail) > QUICK and grows(work, seed, part, tail):
                    return seed, tail, part
    return None


EVERY = patterns()
CALLED = {  # patterns that see less than their module's texts: how many characters, and why
    "resilient.core.gates.rate_limit._SPAN": (0, "fullmatch: tests/core/test_rate_limit.py"),
    "resilient.wire.requests.client._IGNORED": (0, "the program's own GraphQL document"),
    "resilient.core.base.budgets._STRING": (0, "matched at one place: the parsers, below"),
    "resilient.surface.probes._ADDRESS": (0, "fullmatch, of the operator's own option"),
    "resilient.store.db.address._HOST_AND_PORT": (0, "fullmatch, of the operator's own address"),
}


@pytest.mark.parametrize(("slow", "size"), [(r"\s+$", 3_000), (r"(?:a|b)*c", LARGE), (r"\w+@", 3_000), (r"a*b", LARGE)])
def test_what_looks_at_each_place_from_each_is_found(slow, size):
    assert too_slow(re.compile(slow).search, size) is not None


def test_the_patterns_are_found():
    assert len(EVERY) > 60
    assert any("providers." in where for where, _ in EVERY.values())
    assert CALLED.keys() <= {where for where, _ in EVERY.values()}


@pytest.mark.parametrize(("where", "pattern"), EVERY.values(), ids=[where for where, _ in EVERY.values()])
def test_each_pattern_takes_linear_time(where, pattern):
    size, _ = CALLED.get(where, (SEARCHED_CODE.value if where.endswith("code_form") else LARGE, ""))
    assert too_slow(pattern.search, size) is None if size else True, pattern.pattern


PARSERS = {
    "scrub": redact.scrub,
    "urls": urls,
    "masked": masked,
    "without_secrets": without_secrets,
    "links": links,
    "list": parse_list,
    "dictionary": parse_dictionary,
    "plain": plain,
    "one_line": one_line,
    "http_date": lambda t: http_date(t, NOW),
    "in_text": lambda t: in_text(t, NOW),
    "auto": lambda t: read(t, Word.AUTO, NOW),
    "duration": lambda t: read(t, Word.DURATION, NOW),
    "retry_after": lambda t: when({"retry-after": t}, NOW),
    "budgets": lambda t: budgets(dict.fromkeys(BUDGETS, t), NOW),
}
BUDGETS = ("ratelimit", "ratelimit-policy", "x-ratelimit-limit", "x-ratelimit-reset")


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS)
def test_each_parser_takes_linear_time(parse):
    assert too_slow(parse, 2 * LARGE) is None


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS)
@given(text=st.lists(st.sampled_from(SEEDS), max_size=60).map("".join) | st.text(max_size=200))
@settings(max_examples=60)
def test_no_parser_raises_or_takes_long(parse, text):
    assert (
        cpu(parse, text) < 0.2 or passes(parse, text, 5) < 600
    )  # hypothesis's own deadline counts what other processes use of the machine, too


def test_a_megabyte_is_scrubbed_at_once():
    for seed in ("http://a:", "://a:", "password='", "a.", "Bearer "):
        assert passes(redact.scrub, seed * 200_000, 3) < 3_500


HOSTILE = "a\x1b[31mred\x1b]0;title\x07\x9b2J\x85\u202egnp\u2066x\u2028y\rz\x00\ud800\x7f"


def test_nothing_that_a_terminal_obeys_is_left():
    for clean in (plain(HOSTILE), one_line(HOSTILE + "\nINFO forged"), in_json(HOSTILE)):
        assert clean.isprintable()
        clean.encode()
    assert plain("tab\there\nnext") == "tab\there\nnext"
    assert plain("a\r\nb") == "a\nb"


def test_json_means_what_it_meant():
    import json

    value = {"k": "\x9b\u202e é \u2028 \x1b"}
    assert json.loads(in_json(json.dumps(value, ensure_ascii=False))) == value


@pytest.mark.parametrize("where", range(0, 40, 3))
def test_half_a_secret_at_an_edge_is_dropped(where):
    secret = "s3cr3t-" + "0123456789abcdef" * 2
    room = 16 * 1024 - where
    for text in ("x " * (room // 2) + " " * (room % 2) + secret + " tail" * 10, "x" * room + secret * 2):
        shown = redact.scrub(text, [secret], 16_000)
        assert "s3cr" not in shown[-60:]
        assert "0123456789" not in shown
    before = secret + " x" * (room // 2) + " " * (room % 2)
    shown = redact.scrub("head " * 50 + before, [secret], 16_000, end=True)
    assert "abcdef" not in shown


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_half_a_secret_at_the_very_edge_of_what_is_scrubbed(blank):
    secret = "canary-" + "0123456789" * 10
    text = "x" * (16 * 1024 - 30 - len(blank)) + blank + secret + "y" * 100
    assert "canary" not in redact.scrub(text, [secret])
    assert "yranac" not in redact.scrub(text[::-1], [secret[::-1]], end=True)


def test_what_is_shown_is_cut_behind_the_scrub():
    token = "tok-0123456789abcdef"
    for lead in range(470, 510):
        assert "tok-" not in redact.scrub("x" * lead + " " + token + " rest", [token], 500)
