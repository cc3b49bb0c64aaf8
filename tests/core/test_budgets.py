"""What servers say about their limits, in the headers they really send."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.budgets import GENERIC, Budget, BudgetFields, Fields, budgets, counted_for
from resilient.core.base.errors import InvalidInput
from resilient.core.base.instants import Word

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
EPOCH = int(NOW.timestamp())


def in_(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


GITHUB = BudgetFields(
    "core",
    limit="x-ratelimit-limit",
    remaining="x-ratelimit-remaining",
    reset="x-ratelimit-reset",
    word=Word.EPOCH_S,
    window=3600.0,
    named_by="x-ratelimit-resource",
)
LINEAR = tuple(
    BudgetFields(
        kind,
        limit=f"x-ratelimit-{kind}-limit",
        remaining=f"x-ratelimit-{kind}-remaining",
        reset=f"x-ratelimit-{kind}-reset",
        word=Word.EPOCH_MS,
    )
    for kind in ("requests", "complexity")
)
OPENAI = BudgetFields(
    "requests",
    limit="x-ratelimit-limit-requests",
    remaining="x-ratelimit-remaining-requests",
    reset="x-ratelimit-reset-requests",
    word=Word.DURATION,
)
HUBSPOT = (
    BudgetFields("10s", limit="x-hubspot-ratelimit-max", remaining="x-hubspot-ratelimit-remaining", window=10.0),
    BudgetFields("daily", limit="x-hubspot-ratelimit-daily", remaining="x-hubspot-ratelimit-daily-remaining"),
)
SHOPIFY = BudgetFields("bucket", used="x-shopify-shop-api-call-limit")
SALESFORCE = BudgetFields("daily", used="sforce-limit-info", window=86400.0)
ZENDESK = BudgetFields("incremental", combined="zendesk-ratelimit-incremental")
MAX = BudgetFields("x", limit="x-max")


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({}, GENERIC, []),
        ({"content-type": "text/html"}, GENERIC, []),
        (
            {"X-RateLimit-Limit": "60", "X-RateLimit-Remaining": "12", "X-RateLimit-Reset": str(EPOCH + 30)},
            GENERIC,
            [Budget("x-ratelimit", 60, 12, in_(30))],
        ),
        (
            {"X-RateLimit-Remaining": "12", "X-RateLimit-Reset": "30"},
            GENERIC,
            [Budget("x-ratelimit", None, 12, in_(30))],
        ),
        ({"X-Rate-Limit-Remaining": "3"}, GENERIC, [Budget("x-rate-limit", None, 3)]),
        (
            {
                "X-RateLimit-Limit": "30",
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": str(EPOCH + 9),
                "X-RateLimit-Resource": "search",
            },
            [GITHUB],
            [Budget("search", 30, 0, in_(9), 3600.0)],
        ),
        (
            {
                "X-RateLimit-Requests-Limit": "1500",
                "X-RateLimit-Requests-Remaining": "1499",
                "X-RateLimit-Requests-Reset": f"{EPOCH + 60}000",
                "X-RateLimit-Complexity-Remaining": "0",
                "X-RateLimit-Complexity-Reset": f"{EPOCH + 90}500",
            },
            LINEAR,
            [Budget("requests", 1500, 1499, in_(60)), Budget("complexity", None, 0, in_(90.5))],
        ),
        (
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"},
            [OPENAI],
            [Budget("requests", None, 0, in_(360))],
        ),
        (
            {"X-HubSpot-RateLimit-Max": "100", "X-HubSpot-RateLimit-Remaining": "0"},
            HUBSPOT,
            [Budget("10s", 100, 0, None, 10.0)],
        ),
        ({"X-Shopify-Shop-Api-Call-Limit": "32/40"}, [SHOPIFY], [Budget("bucket", 40, 8)]),
        ({"X-Shopify-Shop-Api-Call-Limit": "41/40"}, [SHOPIFY], [Budget("bucket", 40, 0)]),
        (
            {"Sforce-Limit-Info": "api-usage=25/5000; per-app-api-usage=17/250(appName=x)"},
            [SALESFORCE],
            [Budget("daily", 5000, 4975, None, 86400.0)],
        ),
        (
            {"Zendesk-RateLimit-Incremental": "total=10; remaining=0; resets=41"},
            [ZENDESK],
            [Budget("incremental", 10, 0, in_(41))],
        ),
        (
            {"Zendesk-RateLimit-Incremental": "limit=10; remaining=2; reset=41"},
            [ZENDESK],
            [Budget("incremental", 10, 2, in_(41))],
        ),
        # one of several fields is missing
        ({"x-left": "5"}, [BudgetFields("x", used="x-used", remaining="x-left")], [Budget("x", None, 5)]),
        ({"x-left": "5"}, [BudgetFields("x", combined="x-all", remaining="x-left")], [Budget("x", None, 5)]),
        # the older policy within the limit
        ({"x-max": "100, 10;w=1, 100;w=60"}, [MAX], [Budget("x", 100, None, None, 60)]),
        ({"x-max": "100;w=60"}, [MAX], [Budget("x", 100, None, None, 60)]),
        ({"x-max": "100, 10"}, [MAX], [Budget("x", 100)]),
        ({"x-max": "100;w=60"}, [replace(MAX, window=10)], [Budget("x", 100, None, None, 10)]),
        # a reset that has passed is still what the server said
        ({"x-ratelimit-reset": str(EPOCH - 5)}, GENERIC, [Budget("x-ratelimit", reset_at=in_(-5))]),
        # garbage
        (
            {"x-ratelimit-limit": "many", "x-ratelimit-remaining": "-1", "x-ratelimit-reset": "soon"},
            GENERIC,
            [],
        ),
        ({"x-ratelimit-remaining": "nan"}, GENERIC, []),
        ({"x-ratelimit-remaining": "٣"}, GENERIC, []),
        ({"x-shopify-shop-api-call-limit": "a/b"}, [SHOPIFY], []),
        ({"zendesk-ratelimit-incremental": "nothing"}, [ZENDESK], []),
    ],
)
def test_provider_fields(headers, fields, expected):
    assert list(budgets(headers, NOW, fields=fields)) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        # the present draft: Lists, joined by name
        (
            {
                "RateLimit-Policy": '"burst";q=100;w=60,"daily";q=1000;w=86400',
                "RateLimit": '"burst";r=0;t=20, "daily";r=900',
            },
            [Budget("burst", 100, 0, in_(20), 60), Budget("daily", 1000, 900, None, 86400)],
        ),
        ({"RateLimit": '"default";r=50;t=30'}, [Budget("default", None, 50, in_(30))]),
        ({"RateLimit": "default;r=50;t=0"}, [Budget("default", None, 50, NOW)]),
        (
            {
                "RateLimit-Policy": '"size";q=65535;qu="content-bytes";w=10;pk=:cHs=:',
                "RateLimit": '"size";r=10;t=1',
            },
            [Budget("size", 65535, 10, in_(1), 10, "content-bytes")],
        ),
        ({"RateLimit": '"x";t=5'}, []),  # without r it says nothing
        ({"RateLimit": '"x";r=-1'}, []),
        ({"RateLimit": '"x";r=5;t="soon"'}, [Budget("x", None, 5)]),
        ({"RateLimit": '"x";r=5;t=1.5'}, [Budget("x", None, 5)]),
        ({"RateLimit": '"x";r=5,'}, []),  # malformed: ignored as a whole
        ({"RateLimit-Policy": "nonsense("}, []),
        # the older dictionary
        (
            {"RateLimit": "limit=100, remaining=50, reset=5", "RateLimit-Policy": "10;w=1, 100;w=60"},
            [Budget("ratelimit", 100, 50, in_(5), 60)],
        ),
        ({"RateLimit": "limit=100"}, []),
        # three separate fields, older still, with the quota policy inside the limit
        (
            {"RateLimit-Limit": "100, 100;w=60", "RateLimit-Remaining": "50", "RateLimit-Reset": "5"},
            [Budget("ratelimit", 100, 50, in_(5), 60)],
        ),
        (
            {
                "RateLimit-Limit": "10",
                "RateLimit-Remaining": "1",
                "RateLimit-Reset": "5",
                "RateLimit-Policy": "10;w=1",
            },
            [Budget("ratelimit", 10, 1, in_(5), 1)],
        ),
        (
            {"RateLimit-Limit": "600", "RateLimit-Reset": str(EPOCH + 7)},
            [Budget("ratelimit", 600, None, in_(7))],
        ),  # GitLab
    ],
)
def test_ietf_fields(headers, expected):
    assert list(budgets(headers, NOW)) == expected


def test_absolute_resets_are_corrected_by_date_unless_cached():
    slow = {"Date": "Sun, 01 Mar 2026 11:00:00 GMT", "x-ratelimit-reset": str(EPOCH - 3600 + 30)}
    assert budgets(slow, NOW)[0].reset_at == in_(30)
    assert budgets({**slow, "Age": "3600"}, NOW)[0].reset_at == in_(-3570)
    assert budgets({**slow, "Date": "garbage"}, NOW)[0].reset_at == in_(-3570)


def test_a_policy_adds_to_what_the_providers_own_fields_say():
    headers = {"x-left": "7", "ratelimit-policy": '"burst";q=100;w=60'}
    (found,) = budgets(headers, NOW, fields=[BudgetFields("burst", remaining="x-left")])
    assert found == Budget("burst", 100, 7, None, 60)


@pytest.mark.parametrize(
    ("headers", "skew"),
    [
        ({}, 0),
        ({"date": "Sun, 01 Mar 2026 11:00:00 GMT"}, 3600),
        ({"date": "Sunday, 01-Mar-26 11:00:00 GMT"}, 3600),
        ({"date": "Sun, 01 Mar 2026 12:00:30 GMT"}, -30),
        ({"date": "Sun, 01 Mar 2026 11:00:00 GMT", "age": "9"}, 0),
        ({"date": "soon"}, 0),
    ],
)
def test_the_clocks_of_both_differ_by_the_date(headers, skew):
    assert Fields.of(headers).skew(NOW) == timedelta(seconds=skew)


NAMED = (BudgetFields("core", remaining="x-left", named_by="x-budget"),)


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"x-budget": "search"}, "search"),
        ({"X-Budget": "search", "x-left": "3"}, "search"),
        ({"x-left": "3"}, ""),
        ({}, ""),
        ({"ratelimit": '"search";r=0;t=30'}, "search"),
        ({"ratelimit": '"search";r=0;t=30, "daily";r=9;t=900'}, ""),
        ({"ratelimit": '"search";r=0, 100;w=60'}, "search"),
        ({"ratelimit": "limit=9, remaining=3"}, ""),
        ({"x-budget": "", "ratelimit": '"search";r=0'}, "search"),
        ({"x-budget": "core", "ratelimit": '"search";r=0'}, "core"),
        ({"x-budget": "s" * 900}, "s" * 64),
        ({"x-budget": "a\nb"}, "a b"),
    ],
)
def test_the_budget_that_an_answer_names(headers, name):
    assert counted_for(headers, fields=NAMED) == name


def test_an_answer_may_name_no_budget_or_two():
    both = (*NAMED, BudgetFields("more", remaining="x-more", named_by="x-other"), *GENERIC)
    assert counted_for({"x-budget": "search", "x-other": "daily"}, fields=both) == ""
    assert counted_for({"x-budget": "search", "x-other": "search"}, fields=both) == "search"
    assert counted_for({"x-other": "daily"}, fields=both) == "daily"
    assert counted_for({"ratelimit": '"search";r=0'}) == "search"


@pytest.mark.parametrize("name", ["limit", "remaining", "reset", "used", "combined"])
def test_a_budget_is_told_in_one_field_at_least(name):
    fields = BudgetFields("x", **{name: "X-Told"}, named_by="X-Name")
    assert (getattr(fields, name), fields.named_by, fields.stated_in) == ("x-told", "x-name", {"x-told"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"named_by": "x-name"}, "BudgetFields('x'): say in which headers it is told: limit=, remaining=, ..."),
        ({"limit": "x-max", "window": 0}, "BudgetFields(window=0): window is a number above 0"),
        (
            {"limit": "x-max", "word": "soon"},
            "BudgetFields(word='soon'): word is one of " + ", ".join(f"Word.{one.name}" for one in Word),
        ),
    ],
)
def test_fields_that_cannot_be_meant_are_refused_in_words(options, words):
    with pytest.raises(InvalidInput) as caught:
        BudgetFields("x", **options)
    assert str(caught.value) == words


def test_names_are_short():
    headers = {
        "x-ratelimit-remaining": "1",
        "x-ratelimit-resource": "n" * 500,
        "ratelimit": f'"{"m" * 500}";r=1',
    }
    assert [len(b.name) for b in budgets(headers, NOW, fields=[GITHUB])] == [64, 64]


def test_fields_join_repeated_headers_and_are_made_once():
    fields = Fields.of([("RateLimit", '"a";r=1'), ("ratelimit", '"b";r=2'), ("X", "y")])
    assert fields == {"ratelimit": '"a";r=1, "b";r=2', "x": "y"}
    assert Fields.of(fields) is fields
    headers = httpx.Headers([("RateLimit", '"a";r=1'), ("RateLimit", '"b";r=2')])
    assert [b.name for b in budgets(headers, NOW)] == ["a", "b"]


NAMES = [
    "date",
    "age",
    "ratelimit",
    "ratelimit-policy",
    "ratelimit-limit",
    "ratelimit-remaining",
    "ratelimit-reset",
]
NAMES += ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "used", "combined", "name"]
LIKELY = st.text(alphabet='0123456789.-;=, "abrtwqk:?/GMTSun', max_size=40)
ALL = (*GENERIC, BudgetFields("own", used="used", combined="combined", named_by="name", word=Word.AUTO))


@given(st.dictionaries(st.sampled_from(NAMES), st.one_of(st.text(max_size=60), LIKELY)))
def test_never_raises_and_says_only_sane_numbers(headers):
    for budget in budgets(headers, NOW, fields=ALL):
        for value in (budget.limit, budget.remaining, budget.window):
            assert value is None or 0 <= value < float("inf")


def test_a_date_or_a_display_string_beside_it_costs_no_budget():
    found = budgets({"ratelimit": '"a";r=1;t=5;at=@1659578233;why=%"f%c3%bc"'}, NOW)
    assert [(b.name, b.remaining) for b in found] == [("a", 1)]


@pytest.mark.parametrize("r", ["1.5", "-1", '"1"', "?1", "@5"])
def test_what_is_left_is_an_integer(r):
    assert budgets({"ratelimit": f'"a";r={r};t=5'}, NOW) == ()


def test_only_facts_say_that_a_window_is_longer_than_a_day():
    month = 31 * 86_400
    told = {"ratelimit-policy": f'"a";q=100;w={month}', "ratelimit": '"a";r=5;t=60'}
    (budget,) = budgets(told, NOW)
    assert budget.window == 86_400
    told |= {"x-left": "6"}
    (budget,) = budgets(told, NOW, fields=(BudgetFields("a", remaining="x-left", window=month),))
    assert (budget.window, budget.remaining) == (month, 5)
    (budget,) = budgets({"ratelimit-limit": f"100, 100;w={month}", "ratelimit-remaining": "5"}, NOW)
    assert budget.window == 86_400
