"""Where a number is asked for, what is none is refused by the name of its argument: never an `OverflowError`."""

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial

import pytest

from resilient import (
    Alerting,
    BreakerPolicy,
    Job,
    Limit,
    Offset,
    PageNumber,
    PoolSettings,
    RedisStream,
    Resilient,
    Retention,
    Retry,
    Tracing,
    Transient,
    handler,
)
from resilient.core.base.errors import InvalidInput, SetupError
from resilient.core.base.misfit import check_number, is_number, is_whole
from resilient.core.gates.policy import Learning, Policy
from resilient.core.gates.rate_limit import check_shares, seconds
from resilient.core.jobs.backoff import Fixed, FullJitter
from resilient.core.provider.facts import BatchEndpoint

HUGE = 10**400


@handler("nothing")
async def nothing(job: Job[None]) -> None:
    """To have one."""


def worker(**options):
    return Resilient("sqlite:///never.db", handlers=[nothing]).worker(**options)


def pool(name, value):
    return PoolSettings(**{name: value})


NONE = [True, False, HUGE, -HUGE, float("nan"), float("inf"), float("-inf"), "5", [], object()]
NOT_WHOLE = [*NONE, 2.0, 1.5, 0, -1]
WITH_NUMBER = {
    "Limit rate": lambda x: Limit(x, 1),
    "Limit burst": lambda x: Limit(1, 1, burst=x),
    "Limit per": lambda x: Limit(1, {"5": "x"}.get(x, x) if isinstance(x, str) else x),
    "span": lambda x: seconds("" if x == "5" or not isinstance(x, (int, float)) else x),
    "breaker window": lambda x: BreakerPolicy(window=x),
    "breaker ramp": lambda x: BreakerPolicy(ramp=x),
    "breaker ratio": lambda x: BreakerPolicy(ratio=x),
    "learn": lambda x: Learning.of("a", (0.5, x)),
    "learn least": lambda x: Learning.of("a", (x, 1e300)),
    "share": lambda x: check_shares({"a": x, "b": 0.5}, ()),
    "delay": lambda x: FullJitter(base=x),
    "fixed": Fixed,
    "check_number": lambda x: check_number("Wait", "fallback", x),
    "failure rate": lambda x: Alerting(failure_rate=x),
    "age": lambda x: Retention(succeeded="" if x == "5" else x),
    "traced share": lambda x: Tracing(share=x),
    "time of a handler": lambda x: handler("k", timeout=x),
    "lease": lambda x: worker(lease=x),
    "grace": lambda x: worker(grace=x),
    "patience": lambda x: worker(patience=x),
    "drain": lambda x: asyncio.run(worker().drain(timeout=x)),
    **{f"pool {name}": partial(pool, name) for name in ("idle_for", "connect", "read", "write", "wait", "whole")},
    **{f"pool {name}": partial(pool, name) for name in ("error_whole", "tries_within")},
}
WITH_COUNT = {
    "breaker volume": lambda x: BreakerPolicy(volume=x),
    "breaker streak": lambda x: BreakerPolicy(streak=x),
    "concurrency": lambda x: Policy(concurrency=x),
    "attempts": lambda x: Retry(max_attempts=x),
    "retention batch": lambda x: Retention(batch=x),
    "batch endpoint": lambda x: BatchEndpoint(path="/b", most=x),
    "failure volume": lambda x: Alerting(failure_volume=x),
    "periods": lambda x: Alerting(periods=x),
    "length of a stream": lambda x: RedisStream("redis://h", maxlen=x),
    "first page": lambda x: PageNumber(items="i", start={0: "0"}.get(x, x) if isinstance(x, int) else x),
    "first offset": lambda x: Offset(items="i", start={0: "0"}.get(x, x) if isinstance(x, int) else x),
    "batch of a handler": lambda x: handler("k", batch=x),
    "slots": lambda x: worker(concurrency=x),
    "connections": lambda x: Resilient("sqlite:///never.db", connections=x),
    "payload": lambda x: Resilient("sqlite:///never.db", max_payload=x),
    "prune": lambda x: Resilient("sqlite:///never.db").prune_sync(limit=x),
    "cancel": lambda x: Resilient("sqlite:///never.db").sync.jobs.cancel(state="ready", limit=x),
    "drop": lambda x: Resilient("sqlite:///never.db").sync.jobs.delete(state="dead", limit=x),
    **{f"pool {name}": partial(pool, name) for name in ("connections", "largest", "bodies", "error_largest", "tries")},
}


@pytest.mark.parametrize("none", NONE, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("what", WITH_NUMBER)
def test_what_is_no_number_is_refused(what, none):
    with pytest.raises((InvalidInput, SetupError)):
        WITH_NUMBER[what](none)


@pytest.mark.parametrize("none", NOT_WHOLE, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("what", WITH_COUNT)
def test_what_is_no_count_is_refused(what, none):
    with pytest.raises((InvalidInput, SetupError)):
        WITH_COUNT[what](none)


@pytest.mark.parametrize("none", [HUGE, -HUGE, float("nan"), float("inf")], ids=["huge", "low", "nan", "inf"])
def test_a_failure_takes_seconds_that_there_are(none):
    with pytest.raises(InvalidInput, match="Transient"):
        Transient(retry_after=none)


def test_numbers_are_numbers():
    assert all(is_number(one) for one in (0, 1, -1, 0.5, 2**64, -1e308, 10**308))
    assert not any(is_number(one) for one in (*NONE, None, timedelta(1), datetime.now(UTC)))
    assert is_whole(1)
    assert is_whole(2**63 - 1)
    assert is_whole(-100, -100, 100)
    assert not any(is_whole(one) for one in (*NOT_WHOLE, None, 2**63))
    assert not is_whole(101, -100, 100)
    assert not is_whole(-101, -100, 100)


def test_what_was_meant_is_taken():
    assert Limit(10**300, 1).rate == 1e300
    assert Limit(5, "5s", burst=1).capacity == 1.0
    assert seconds(0.25) == 0.25
    assert seconds(timedelta(minutes=1)) == 60.0
    assert seconds(Decimal("2.5")) == 2.5
    assert BreakerPolicy(ramp=0, ratio=None, streak=None).ramp == 0
    assert Learning.of("a", (1, 2)).bounds == (1.0, 2.0)
    check_number("Wait", "fallback", None)
    check_number("OAuth2", "margin", 0, above=False)


def test_a_number_of_zero_is_one_where_counting_begins_there():
    assert (PageNumber(items="i", start=0).start, Offset(items="i", start=0).start, PoolSettings(idle=0).idle) == (
        0,
    ) * 3


@pytest.mark.parametrize("value", [True, 2.0, -1, "2", HUGE])
def test_a_version_is_a_whole_number(value):
    with pytest.raises(InvalidInput, match="version"):
        handler("k", version=value)(nothing.fn)


def test_a_span_that_began_before_all_time_is_refused():
    """Its first use would be an `OverflowError` of a chore, each time."""
    for option in (lambda x: Retention(succeeded=x), lambda x: Alerting(repeat=x)):
        assert option("365000d")
        with pytest.raises(InvalidInput, match="365,000 days"):
            option("365001d")
