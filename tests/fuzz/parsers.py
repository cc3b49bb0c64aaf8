"""Every parser of text that a stranger writes, under a name; what each may refuse and what it may cost.

An input is text. Where bytes are read, its characters are bytes; an answer or a delivery is written as on the wire: a
first line, headers, an empty line, the body. What a parser raises besides its refusals is a finding, and so is what
costs more than its bound.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import pkgutil
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

import providers
from resilient import (
    AnswerFacts,
    Credentials,
    Delivery,
    InvalidInput,
    Limit,
    OAuth2,
    PageRequest,
    PagingError,
    Provider,
    RequestFacts,
    SetupError,
    Word,
)
from resilient.core.accounts.tokens import classify_token, merge
from resilient.core.base import resource_key
from resilient.core.base.body import hidden, pick
from resilient.core.base.budgets import Fields, budgets, parse_dictionary, parse_list
from resilient.core.base.hosts import (
    address,
    denied,
    host_pattern,
    is_private,
    origin_of,
    without_params,
    without_secrets,
)
from resilient.core.base.instants import duration, http_date, iso8601, read
from resilient.core.base.loggers import urls
from resilient.core.base.phrases import fits_header, in_json, one_line, plain
from resilient.core.base.tracing import _links as trace_links
from resilient.core.events.message import decode
from resilient.core.events.webhook import challenge, event_name, identity, items_of, prove, repeat_key
from resilient.core.gates.policy import Policy
from resilient.core.gates.retry_after import in_text, when
from resilient.core.provider.classify import classify, cost_of, message_of
from resilient.core.provider.facts import GENERIC
from resilient.core.provider.placeholders import fill_url
from resilient.core.schedules.cron import Ticks, back, next_after, ticks
from resilient.core.sync import stream as sync
from resilient.core.sync.incremental import instant, later, shifted
from resilient.core.sync.paginators import links
from resilient.engine.events.webhooks import _decoded as delivered
from resilient.store.accounts.secrets import KeyRing, SecretsUnreadable
from resilient.store.db.address import checked as database_address
from resilient.surface.cli.jobs import moment, span, tags_of, word_or_none
from resilient.surface.probes import Address
from resilient.surface.shards import _place_of as shard_place
from resilient.surface.web.dashboard.words import as_word, prose, words_of
from resilient.wire.oauth.endpoints import _decoded as token_body
from resilient.wire.oauth.endpoints import callback_error
from resilient.wire.requests import redact
from resilient.wire.requests.answer import Answer, Decoder
from resilient.wire.requests.pool import PoolSettings

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
SECRET = "whsec-0123456789abcdef"


class Parser(NamedTuple):
    """``words``: what inputs are made of. ``micros``: CPU microseconds and ``memory``: bytes, for each character."""

    run: Callable[[str], Any]
    words: tuple[str, ...]
    refuses: tuple[type[Exception], ...] = ()
    micros: float = 3.0
    memory: float = 60.0


def known():
    """Every provider's facts."""
    found = []
    for info in pkgutil.iter_modules(providers.__path__):
        make = importlib.import_module(f"providers.{info.name}").provider
        try:
            found.append(make())
        except TypeError:
            found.append(make(client_id="c", client_secret="s"))
    return [*found, GENERIC]


FACTS: list[Provider] = known()
HOOKS = [one for one in FACTS if one.webhook is not None]
OAUTH = [way for one in FACTS for way in one.auth if isinstance(way, OAuth2)] + [OAuth2(token_url="https://a/t")]
ASKED = RequestFacts("GET", "https://api.example.com/x", "api.example.com", "/x", key="p/a")


def raw(text):
    """Its bytes: one for each character where it can be."""
    return text.encode("latin-1", "replace")


def parts(text):
    """First line, headers and body of what was written as on the wire."""
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    first, *lines = head.split("\n")
    pairs = [line.partition(":")[::2] for line in lines]
    return first, [(name.strip() or "x", value.strip()) for name, value in pairs], raw(body)


def answered(text):
    """An answer's values, as the wire makes them."""
    first, headers, body = parts(text)
    status = int(first[:3]) if first[:3].isascii() and first[:3].isdigit() and first[:3] >= "200" else 429
    made = Answer.of(httpx.Response(min(status, 599), content=body), PoolSettings())
    return made.facts(Fields.of(headers), budgets(Fields.of(headers), NOW))


def an_answer(text):
    facts = answered(text)
    for provider in FACTS:
        failure = classify(facts, ASKED, provider, NOW)
        message_of(facts, provider)
        cost = cost_of(facts, provider)
        assert failure is None or failure.retry_in is None or failure.retry_in > 0
        assert cost is None or 0 <= cost < float("inf")


def a_token_answer(text):
    facts = answered(text)
    body = token_body(parts(text)[2])
    for oauth in OAUTH:
        classify_token(AnswerFacts(facts.status, facts.headers, body=body, text=facts.text), oauth, NOW)
        fresh = merge(Credentials(token="t", refresh_token="r"), body, oauth, NOW)
        assert fresh is None or fresh.token


def a_delivery(text):
    first, headers, body = parts(text)
    url = f"https://me.example/hooks/{first[:200]}"
    delivery = Delivery(headers=dict(headers), body=body, url=url, method="POST")
    fields, decoded = Fields.of(delivery.headers), delivered(delivery)
    for provider in HOOKS:
        hook = provider.webhook
        proof = prove(hook, delivery, [SECRET], NOW, body=decoded, ed25519=lambda *_: False)
        challenge(hook, fields, decoded, url, [SECRET])
        for item in items_of(hook, decoded) or [None]:
            identity(hook, fields, decoded, url, item)
            event_name(hook, fields, decoded, url, item)
            repeat_key(hook, proof, delivery, decoded, "a", item)


def a_signed_delivery(text):
    """What is signed by whom it should be, whatever it says."""
    body = raw(text)
    stripe = next(one for one in HOOKS if one.name == "stripe").webhook
    at = str(int(NOW.timestamp()))
    proof = hmac.new(SECRET.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    delivery = Delivery(headers={"Stripe-Signature": f"t={at},v1={proof}"}, body=body, url="https://me.example/h")
    found = prove(stripe, delivery, [SECRET], NOW, body=delivered(delivery))
    assert found.reason == "", found.reason


def a_page(text):
    facts = answered(text)
    for paginator in PAGINATORS:
        first = paginator.first(PageRequest("https://api.example.com/items?page=1"))
        found = paginator.read(first, facts)
        if found.next is not None:
            assert PageRequest.from_json(json.loads(json.dumps(found.next.to_json()))) == found.next


def a_sync(text):
    facts = answered(text)
    for paginator in PAGINATORS[-4:]:
        for rules in RULES:
            cursor = sync.begin(sync.Cursor(), NOW, rules)
            cursor = sync.replace(cursor, next=paginator.first(PageRequest("https://api.example.com/items")))
            found = paginator.read(cursor.next, facts)
            _, cursor = sync.take(cursor, cursor.next, facts, found, rules, NOW)
            sync.Cursor.from_json(json.loads(json.dumps(cursor.to_json())))


def paginators():
    from resilient.core.sync.paginators import (
        GraphQLPages,
        LastKey,
        LinkHeader,
        NextCursor,
        NextUrl,
        Offset,
        OnePage,
        PageNumber,
    )

    declared = {repr(way): way for one in FACTS for way in one.pagination.values()}
    return [
        *declared.values(), OnePage(), LinkHeader(), NextUrl(items="data", url="next"), GraphQLPages(),
        NextCursor(items="data", cursor="next", query="cursor", resume="sync"), LastKey(items="data", query="after"),
        PageNumber(items="data", pages="pages"), Offset(items="data", total="total"),
    ]  # fmt: skip


def all_rules():
    from resilient.core.sync.incremental import Incremental

    by_time = Incremental(style="filter", query="since", field="updated_at", precision=1.0)
    token = Incremental(style="token", query="token", cursor="sync", source="last_page")
    marked = Incremental(
        style="filter", query="since", field="at", deletions="marked", deleted="deleted", deleted_key="items[].id"
    )
    return [sync.Rules(), *(sync.Rules(incremental=one, deleted=one.deleted) for one in (by_time, token, marked))]


PAGINATORS, RULES = paginators(), all_rules()


def a_url(text):
    without_secrets(text)
    without_params(text, frozenset({"api_key", "token"}))
    PageRequest("https://api.example.com/x?a=1").at(text)


def an_address(text):
    address(text)
    origin_of(text)
    host_pattern(text)


def a_host(text):
    denied(text)
    is_private(text)


def an_account_value(text):
    """What an account says of itself, in an address: it leads to no other host."""
    assert origin_of(fill_url("https://{tenant}.example.com/v1", {"tenant": text}))[1].endswith(".example.com")
    fill_url("{base}/v1", {"base": text})


def a_cron(text):
    spec = ticks(cron=text)
    Ticks.from_json(spec.to_json())
    first = next_after(spec, NOW)
    assert first > NOW
    back(spec, NOW, 3, NOW - timedelta(days=400))


def a_key(text):
    resource_key.check(text)
    for one in resource_key.path(text):
        assert resource_key.matches(one, one)


def a_pattern(text):
    resource_key.check_pattern(text)
    resource_key.matches("github/acct-7/search", text)


def a_document(text):
    """A body by the paths facts name."""
    body = token_body(raw(text))
    for path in ("error.code", "errors[].extensions.code", "data.*.userErrors", "error['.tag']", "errors[0].code"):
        pick(body, path)
        hidden(body, path)


def a_coded_body(text):
    for coding in ("gzip", "deflate", "", "gzip, gzip", "br", text[:20]):
        decoder = Decoder(coding)
        try:
            for part in decoder.feed(raw(text)):
                assert len(part) <= 64 * 1024
            decoder.rest()
        except (httpx.DecodingError, httpx.RemoteProtocolError):
            pass


def an_event(text):
    decode(text, delivery="d", number=3)


def a_change(text):
    """A value by which a sync asks for what is newer."""
    instant(text)
    later(text, "2026-01-01T00:00:00Z")
    later("5", text)
    if instant(text) is not None:
        shifted(text, -60)


def times_of_people(text):
    moment("--since", text)
    span("--for", text)


def an_override(text):
    """A row's override, as an operator or an older version wrote it."""
    doc = json.loads(text)
    Policy().stored(doc)
    if isinstance(doc, dict):
        Policy().overridden(doc)


def a_trace(text):
    """The trace context of a job's row, and of an event."""
    parent, _, state = text.partition("\n")
    assert len(trace_links([{"traceparent": parent}, {"traceparent": parent, "tracestate": state}])) <= 1


def a_shard(text):
    """Where a shard's tables are, by its address."""
    shard_place(database_address(text))


TAG = re.compile("</?([a-zA-Z]*)")


def a_sentence(text):
    """What a page says, strangers' words in it."""
    said = prose({"now": NOW}, text, str, key="p/a")
    assert set(TAG.findall(said)) <= {"a", "code", "time", "wbr"}


def a_filter(text):
    """Words as a page writes them into an address are read as the same, with the blanks at their ends."""
    words = words_of(text)
    assert [word_or_none(one) for one in words_of(" , ".join(as_word(word) for word in words))] == words


RING = KeyRing(["rsk1_" + "A" * 43])


def a_ciphertext(text):
    """What a row keeps of an account: without its key nobody writes one."""
    for sealed in (text, f"{RING.current}:{text}"):
        try:
            RING.open(sealed, "grant", "1", "secrets")
        except SecretsUnreadable:
            pass
        else:
            raise AssertionError
    assert not RING.is_signed(text)
    assert not RING.is_mark(f"1.{RING.current}.{text}", "consent", text)


DATES = ("Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 ", "Sun Nov  6 08:49:37 1994", "2026-11-01T12:00:00Z",
         "-", ":", "T", "Z", "+02:00", ".", " ", ",", "0", "9" * 30, "1e9", "GMT", "-0001", "é", "\x00",
         "1761998400")  # fmt: skip
NAMES = ("retry-after", "retry-after-ms", "x-ms-retry-after-ms", "x-ratelimit-limit", "x-ratelimit-remaining",
         "x-ratelimit-reset", "ratelimit", "ratelimit-policy", "date", "age", "link", "content-type", "location",
         "x-shopify-shop-api-call-limit", "x-ms-resource-unit", "www-authenticate")  # fmt: skip
JSON = ("{", "}", "[", "]", '"', ":", ",", "1", "-", "1e999", "NaN", "null", "true", '"error"', '"code"', '"errors"',
        '"message"', '"data"', '"next"', '"extensions"', '"id"', "9" * 5000, '"\\ud800"', '"\\u0000"', "\\", '"a":',
        '{"error":', "[[", '{"errors":[{"extensions":{"code":"THROTTLED"}}]}', '"retry_after"', " ", "é")  # fmt: skip
WIRE = ("200\n", "429\n", "503\n", "401\n", "\n", "\n\n", *(f"{name}: " for name in NAMES), "120", *DATES, *JSON,
        '<https://api.example.com/x?page=2>; rel="next"', "100;w=60", '"app";r=5;t=10')  # fmt: skip
TOKENS = ('"access_token"', '"refresh_token"', '"expires_in"', '"invalid_grant"', '"error_description"',
          "access_token=", '{"access_token":"t","expires_in":', '"ok":false', '"authed_user"')  # fmt: skip
SIGNED = ("x-hub-signature-256: ", "sha256=", "stripe-signature: ", "t=1793534400,v1=", "webhook-signature: ", "v1,",
          "x-slack-signature: ", "v0=", "x-shopify-hmac-sha256: ", "==", "paypal-", "content-type: ", "\xff",
          "application/x-www-form-urlencoded", "application/json", "a=b&", "%00", "%ff", "+", "validationToken=",
          '"challenge"', '"url_verification"', "x-goog-channel-token: ", "whsec_",
          '"value":[{"clientState":')  # fmt: skip
URLS = ("http://", "https://", "//", "/", "?", "#", "@", ":", "\\", "a", "api.example.com", "[::1]", "[", "]", ":443",
        "%2f", "..", "user:pw@", "*.", "xn--", "é", "\x00", " ", "127.0.0.1", "0x7f.1", "2130706433", "::ffff:10.0.0.1",
        "&api_key=x", "=", "localhost", "%25en0", "64:ff9b::", ":99999")  # fmt: skip
WORDS = ("password=", 'secret="', "Bearer ", "Basic ", "token: ", "http://u:p@h/", "a.", "\x1b[31m", "\u202e",
         "\n", "'", '"', "\\", "x" * 20, " ", "(b'", "', b'", "retry after ", "try again in 1", "h", "m", "s", "é",
         "\ud800")  # fmt: skip

PARSERS = {
    "retry_after": Parser(lambda t: [when({name: t, "date": t}, NOW) for name in NAMES[:3]], (*DATES, ", ", "120")),
    "dates": Parser(lambda t: (http_date(t, NOW), iso8601(t), duration(t)), DATES),
    "times": Parser(lambda t: [read(t, word, NOW) for word in Word], (*DATES, "1h", "2m", "3s", "ms", "P1DT2H")),
    "times_in_text": Parser(lambda t: in_text(t, NOW), (*WORDS, *DATES), micros=6),
    "structured_fields": Parser(
        lambda t: (parse_list(t), parse_dictionary(t)),
        ("a", "A", "1", "-1.5", '"', "\\", ";", "=", ",", " ", "?1", ":YQ==:", "@1", '%"é"', "(", ")", "*", "\t", "é"),
        memory=200,
    ),
    "budgets": Parser(lambda t: budgets(Fields.of(parts(t)[1]), NOW), WIRE, memory=200, micros=6),
    "links": Parser(
        links, ("<", ">", ";", ",", '"', "\\", "rel=", "next", "=", " ", "a", "*", "https://a/?x=1"), memory=200
    ),
    "answers": Parser(an_answer, WIRE, micros=60, memory=200),
    "token_answers": Parser(a_token_answer, (*WIRE, *TOKENS), micros=60, memory=200),
    "pages": Parser(a_page, WIRE, refuses=(PagingError,), micros=60, memory=200),
    "syncs": Parser(
        a_sync, (*WIRE, '"updated_at"', '"deleted"', '"sync"'), refuses=(PagingError,), micros=200, memory=400
    ),
    "bodies": Parser(a_document, JSON, memory=200),
    "coded_bodies": Parser(
        a_coded_body,
        (
            "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
            "x\x9c",
            "\x00\x00\x00\xff\xff",
            "K\x04\x00",
            "\x03\x00",
            "gzip",
            "\xff",
        ),
        memory=20_000,  # a piece of 64 KiB, and zlib's window
        micros=30,
    ),
    "deliveries": Parser(a_delivery, (*SIGNED, *JSON, "\n", "\n\n", ": "), micros=150, memory=400),
    "signed_deliveries": Parser(a_signed_delivery, (*SIGNED, *JSON), micros=10, memory=200),
    "urls": Parser(a_url, URLS, refuses=(InvalidInput, PagingError)),
    "addresses": Parser(an_address, URLS, refuses=(InvalidInput,)),
    "hosts": Parser(a_host, (*URLS, *"0123456789abcdef.:")),
    "callbacks": Parser(
        lambda t: callback_error(dict(httpx.QueryParams(t))), ("error=", "&", "%", "+", "state=", "a", "\x00")
    ),
    "plain_text": Parser(lambda t: (plain(t), one_line(t), in_json(t), fits_header(t)), WORDS),
    "scrubbed": Parser(lambda t: (redact.scrub(t, ["s3cr3t-value"]), urls(t)), (*WORDS, "s3cr3t-value"), micros=20),
    "cron": Parser(
        a_cron,
        (
            "*",
            "/",
            "-",
            ",",
            "0",
            "1",
            "59",
            "31",
            "2",
            "L",
            "#",
            "MON",
            "JAN",
            " ",
            "@daily",
            "7",
            "* * * * *",
            "\t",
            "W",
        ),
        refuses=(InvalidInput,),
        micros=2_000,  # a day that comes every twenty-eight years is looked for day by day
        memory=2_000,
    ),
    "spans": Parser(
        Limit.parse, ("100", "/", "min", "1h", " burst ", ".", "e9", "-", "nan", "inf", "0"), refuses=(InvalidInput,)
    ),
    "times_of_people": Parser(times_of_people, (*DATES, "+", "1h", "7d", "90s"), refuses=(InvalidInput,)),
    "tags": Parser(lambda t: tags_of(t.split(" ")), ("a=b", "=", " ", "x"), refuses=(InvalidInput,), memory=300),
    "resource_keys": Parser(
        a_key, ("github", "/", "a", ".", ":", "@", "*", " ", "é", "\n", "\x00"), refuses=(InvalidInput,), memory=400
    ),
    "patterns": Parser(
        a_pattern, ("github", "/", "*", "?", "**", "[", "]", "a", "\n"), refuses=(InvalidInput,), micros=20, memory=400
    ),
    "account_values": Parser(an_account_value, (*URLS, "acme", "-"), refuses=(InvalidInput,)),
    "database_addresses": Parser(
        database_address,
        (
            "postgresql://",
            "sqlite:///",
            "u:p@",
            "h",
            ":5432",
            "/db",
            "?host=",
            "&port=",
            ",",
            "=",
            "[",
            "]",
            "%",
            "+psycopg",
        ),
        refuses=(SetupError,),
        micros=20,
        memory=200,
    ),
    "events": Parser(
        an_event, (*JSON, '"type"', '"sequence"', '{"id":"1","type":"t"'), refuses=(ValueError,), memory=200
    ),
    "overrides": Parser(
        an_override,
        (*JSON, '"limits"', '"breaker"', '"rate"', '"per"', '"concurrency"'),
        refuses=(ValueError, InvalidInput),
        memory=200,
        micros=10,
    ),
    "newest": Parser(a_change, DATES),
    "traces": Parser(
        a_trace,
        ("00-", "0" * 31, "1", "0123456789abcdef", "-01", "-", "\n", "a=b", ",", "@", "=", "ff", "é", " ", "\t"),
        micros=10,
        memory=200,
    ),
    "shards": Parser(
        a_shard,
        (
            "postgresql://",
            "sqlite:///",
            "u:p@",
            "h",
            ":5432",
            "/db",
            "?host=",
            "&port=",
            ",",
            "%",
            "\x00",
            ":memory:",
            "..",
        ),
        refuses=(SetupError,),
        micros=30,
        memory=300,
    ),
    "sentences": Parser(
        a_sentence,
        (
            *WORDS,
            "`",
            "p/a",
            "00:00:00 UTC",
            "2026-01-01 ",
            " (in ",
            ")",
            ";",
            "workflow ",
            "<b>",
            "&",
            "`resilient jobs retry ",
            "01890a5d-ac96-774b-bcce-b302099a8057",
        ),
        micros=20,
        memory=400,
    ),
    "filters": Parser(a_filter, ("a", ",", "\\", " ", "'", "\n", "é"), memory=300, micros=10),
    "listening": Parser(
        lambda t: Address.of("--health", t), ("9100", ":", "[::1]", "h", "99999", "٣", "\n"), refuses=(InvalidInput,)
    ),
    "ciphertexts": Parser(a_ciphertext, ("AAAA", "=", ":", ".", "1.", "é", "0123456789ab", "+/", "\n"), memory=200),
}
