"""Delay strategies and the Retry policy, with the dice in hand."""

import random
import re
from datetime import timedelta

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from resilient.core.base.errors import Failure, FailureKind, InvalidInput, JobFailure
from resilient.core.jobs.backoff import (
    CONFLICT_DELAY,
    LONGEST,
    Decorrelated,
    EqualJitter,
    Exponential,
    Fixed,
    FullJitter,
    Linear,
    PlusMinus,
    Retry,
    as_delay,
    retry_pause,
    spread_upwards,
)

HIGH = 0.9999999


@pytest.mark.parametrize(
    ("delay", "roll", "expected"),
    [
        (Fixed(7), 0.9, [7, 7, 7, 7]),
        (Fixed(0), 0.9, [0, 0, 0, 0]),
        (Fixed(timedelta(minutes=1)), 0.0, [60, 60, 60, 60]),
        (Linear(), 0.9, [30, 60, 90, 120]),
        (Linear(step=10, cap=25), 0.9, [10, 20, 25, 25]),
        (Linear(timedelta(minutes=1)), 0.0, [60, 120, 180, 240]),
        (Exponential(), 0.9, [1, 2, 4, 8]),
        (Exponential(base=2, factor=3, cap=10), 0.1, [2, 6, 10, 10]),
        (Exponential(timedelta(seconds=5), cap=timedelta(seconds=15)), 0.1, [5, 10, 15, 15]),
        (FullJitter(), 0.5, [0.75, 1.25, 2.25, 4.25]),  # in the middle between the floor and the curve
        (FullJitter(), 0.0, [0.5, 0.5, 0.5, 0.5]),  # the floor: half the base
        (FullJitter(base=4, cap=8), 0.75, [3.5, 6.5, 6.5, 6.5]),  # jitter after the cap
        (EqualJitter(), 0.0, [0.5, 1, 2, 4]),
        (EqualJitter(cap=4), 0.5, [0.75, 1.5, 3, 3]),
        (PlusMinus(), 0.0, [0.8, 1.6, 3.2, 6.4]),
        (PlusMinus(), 0.5, [1, 2, 4, 8]),
        (PlusMinus(Exponential(cap=4)), 0.75, [1.1, 2.2, 4.4, 4.4]),
        (PlusMinus(Linear(), ratio=0.1), 0.0, [27, 54, 81, 108]),
        (PlusMinus(10, ratio=1), 0.25, [5, 5, 5, 5]),
        (PlusMinus(10, ratio=0), 0.25, [10, 10, 10, 10]),
        (Decorrelated(base=3, cap=3), 0.5, [3, 3, 3, 3]),
        (as_delay(lambda attempt: attempt**2), 0.9, [1, 4, 9, 16]),
        (as_delay(lambda attempt: timedelta(minutes=attempt)), 0.9, [60, 120, 180, 240]),
        (as_delay(timedelta(seconds=3)), 0.9, [3, 3, 3, 3]),
        (as_delay(2.5), 0.9, [2.5, 2.5, 2.5, 2.5]),
        (Decorrelated(), 0.0, [1, 1, 1, 1]),
    ],
)
def test_strategies(delay, roll, expected):
    assert [delay.seconds(n, roll) for n in (1, 2, 3, 4)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (Linear, {"step": 30, "cap": 3600}),
        (Exponential, {"base": 1, "factor": 2, "cap": 600}),
        (Decorrelated, {"base": 1, "cap": 600}),
        (PlusMinus, {"of": Exponential(), "ratio": 0.2}),
        (lambda: Exponential(base=5, factor=1, cap=5), {"base": 5, "factor": 1, "cap": 5}),
        (lambda: Decorrelated(base=5, cap=5), {"base": 5, "cap": 5}),
        (lambda: PlusMinus(10, ratio=1), {"of": Fixed(10), "ratio": 1}),
        (lambda: PlusMinus(10, ratio=0), {"of": Fixed(10), "ratio": 0}),
    ],
)
def test_defaults_and_the_most_that_may_be_said(make, fields):
    delay = make()
    assert {name: getattr(delay, name) for name in delay.__dataclass_fields__} == fields


def test_a_function_is_called_with_the_attempt():
    assert [as_delay(lambda attempt: attempt**2).seconds(n, 0.5) for n in (1, 3)] == [1, 9]


def test_the_delay_after_ever_so_many_attempts():
    assert Exponential(base=1, factor=10, cap=600).seconds(10**6, 0.5) == 600
    assert Exponential(base=0, factor=10).seconds(10**6, 0.5) == 0
    assert Exponential(base=3, factor=10).seconds(0, 0.5) == 3  # a job that waited only


@pytest.mark.parametrize(
    ("tries", "roll", "longest", "pause"),
    [
        (0, 0.0, {}, 0.1),
        (1, 0.0, {}, 0.2),
        (1, 0.5, {}, 0.25),
        (6, 0.0, {}, 6.4),
        (7, 0.0, {}, 10),
        (7, 0.5, {}, 12.5),
        (3, 0.0, {"longest": 0.3}, 0.3),
        (10, 0.0, {"longest": 1000}, 102.4),
        (10**9, 0.0, {"longest": 1000}, 102.4),
    ],
)
def test_the_pause_before_a_database_is_tried_again(tries, roll, longest, pause):
    assert retry_pause(tries, roll, **longest) == pytest.approx(pause)


def test_who_was_stopped_together_comes_back_apart_and_not_earlier():
    assert [spread_upwards(8, roll) for roll in (0.0, 0.5, 0.75)] == [8, 10, 11]


JITTERED = [
    FullJitter(),
    FullJitter(base=4, cap=8),
    EqualJitter(),
    Decorrelated(),
    Decorrelated(base=2, cap=30),
    PlusMinus(),
    PlusMinus(Linear()),
    PlusMinus(10),
    CONFLICT_DELAY,
]


@pytest.mark.parametrize("delay", JITTERED, ids=repr)
@pytest.mark.parametrize("attempt", [1, 2, 3, 8, 50])
def test_no_two_of_many_jobs_come_back_at_one_moment(delay, attempt):
    dice = random.Random(7)
    delays = sorted(delay.seconds(attempt, dice.random()) for _ in range(200))
    assert len({round(one, 6) for one in delays}) == 200
    if isinstance(delay, Decorrelated):
        return  # by its nature most of its delays are short
    span = delays[-1] - delays[0]
    fullest = max(sum(low <= one < low + span / 10 for one in delays) for low in delays)
    assert fullest < 80  # of 200 in the fullest tenth of the time: no lump


@pytest.mark.parametrize("kind", [FailureKind.TRANSIENT, FailureKind.CONFLICT, FailureKind.BUG])
def test_nor_by_the_default_policy(kind):
    dice, retry = random.Random(7), Retry()
    assert len({retry.seconds(kind, 1, dice.random()) for _ in range(200)}) == 200


def test_a_decorrelated_delay_is_as_likely_as_if_its_chain_were_kept():
    """Compared with chains that keep the delay before (base, 3 x the delay before, cap), attempt by attempt."""
    dice, delay = random.Random(7), Decorrelated(base=1, cap=100)
    kept = [1.0] * 4000
    for attempt in range(1, 8):
        kept = [1 + dice.random() * (min(100, 3 * before) - 1) for before in kept]
        rolled = [delay.seconds(attempt, dice.random()) for _ in kept]
        for share in (0.1, 0.5, 0.9):
            there, here = (sorted(some)[int(share * len(some))] for some in (kept, rolled))
            assert here == pytest.approx(there, rel=0.15)


def test_jitter_spreads_those_who_have_reached_the_cap():
    for delay in (
        FullJitter(cap=60),
        EqualJitter(cap=60),
        PlusMinus(Exponential(cap=60)),
        Decorrelated(cap=60),
    ):
        at_cap = {delay.seconds(50, roll / 10) for roll in range(10)}
        assert len(at_cap) >= 9, delay


STRATEGIES = st.one_of(
    st.builds(Exponential, st.floats(0, 10), st.floats(1, 10), st.floats(10, 1e6)),
    st.builds(FullJitter, st.floats(0, 10), st.floats(1, 10), st.floats(10, 1e6)),
    st.builds(EqualJitter, st.floats(0, 10), st.floats(1, 10), st.floats(10, 1e6)),
    st.builds(Decorrelated, st.floats(0, 10), st.floats(10, 1e6)),
    st.builds(Linear, st.floats(0, 1e6), st.floats(0, 1e6)),
)


@given(STRATEGIES, st.integers(0, 10**9), st.floats(0, 1, exclude_max=True))
def test_delays_stay_between_zero_and_the_cap(delay, attempt, roll):
    assert 0 <= delay.seconds(attempt, roll) <= delay.cap
    assert 0 <= PlusMinus(delay).seconds(attempt, roll) <= delay.cap * 1.2 + 1e-9


# -- tenacity --------------------------------------------------------------------------------------


class Doubling(tenacity.wait.wait_base):
    """A user's own subclass."""

    def __call__(self, retry_state):
        return 2.0**retry_state.attempt_number


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (tenacity.wait_fixed(3), [3, 3, 3]),
        (tenacity.wait_none(), [0, 0, 0]),
        (tenacity.wait_incrementing(start=1, increment=2), [1, 3, 5]),
        (tenacity.wait_exponential(multiplier=1, max=3), [1, 2, 3]),
        (tenacity.wait_chain(tenacity.wait_fixed(1), tenacity.wait_fixed(9)), [1, 9, 9]),
        (tenacity.wait_fixed(3) + tenacity.wait_incrementing(start=1, increment=1), [4, 5, 6]),
        (Doubling(), [2, 4, 8]),
    ],
)
def test_tenacity_waits(wait, expected):
    retry = Retry(delay=wait)
    assert [retry.seconds(FailureKind.TRANSIENT, n, 0.5) for n in (1, 2, 3)] == expected


@pytest.mark.parametrize(
    ("wait", "low", "high"),
    [
        (tenacity.wait_random(1, 2), 1, 2),
        (tenacity.wait_random_exponential(multiplier=1, max=4), 0, 4),
        (tenacity.wait_exponential_jitter(max=10, jitter=1), 4, 5),
    ],
)
def test_tenacity_waits_with_dice_of_their_own(wait, low, high):
    assert all(low <= as_delay(wait).seconds(3, 0.0) <= high for _ in range(20))


def test_tenacitys_wait_exception_sees_the_failure():
    def by_error(error: BaseException) -> float:
        assert isinstance(error, JobFailure)
        return 5.0 if error.failure.code == "http_503" else 1.0

    retry = Retry(delay=tenacity.wait_exception(by_error))
    assert retry.seconds(FailureKind.TRANSIENT, 1, 0.5, Failure(FailureKind.TRANSIENT, code="http_503")) == 5
    assert retry.seconds(FailureKind.BUG, 1, 0.5, Failure(FailureKind.BUG)) == 1
    assert as_delay(tenacity.wait_exception(by_error)).seconds(1, 0.5) == 1


class State(tenacity.wait.wait_base):
    """Keeps what it is called with."""

    def __call__(self, retry_state):
        self.state = retry_state
        return 1.0


def test_a_tenacity_wait_is_called_with_all_that_tenacity_calls_it_with():
    wait, error = State(), Failure(FailureKind.BUG, code="x")
    Retry(delay=wait).seconds(FailureKind.BUG, 3, 0.5, error)
    fresh = tenacity.RetryCallState(retry_object=None, fn=None, args=(), kwargs={})
    names = {name for name in (*vars(fresh), "seconds_since_start") if not name.startswith("_")}
    same = names - {"attempt_number", "outcome", "start_time"}
    assert {name: getattr(wait.state, name) for name in same} == {name: getattr(fresh, name) for name in same}
    assert (wait.state.attempt_number, wait.state.start_time) == (3, 0.0)
    outcome = wait.state.outcome
    assert (outcome.failed, outcome.attempt_number) == (True, 3)
    assert (str(outcome.exception()), outcome.exception().failure) == ("failed", error)
    as_delay(wait).seconds(2, 0.5)
    assert wait.state.outcome.exception().failure == Failure(FailureKind.TRANSIENT)


@pytest.mark.parametrize("module", ["tenacity", "tenacity.wait", "tenacity.some.where"])
def test_what_comes_from_anywhere_in_tenacity_is_a_wait_of_its(module):
    wait = type("Wait", (), {"__module__": module, "__call__": lambda _, state: state.attempt_number * 2})()
    assert as_delay(wait).seconds(4, 0.5) == 8


# -- Retry -----------------------------------------------------------------------------------------


def test_defaults():
    retry = Retry()
    assert (retry.max_attempts, retry.max_rescues) == (10, 3)
    assert retry.delay == FullJitter(base=1, factor=2, cap=600)


def test_it_is_a_value():
    one = Retry(5, Linear(), by_kind={"bug": Retry(max_attempts=2)})
    assert one == Retry(5, Linear(), by_kind={FailureKind.BUG: Retry(max_attempts=2)})
    assert hash(one) == hash(Retry(5, Linear(), by_kind={"bug": Retry(max_attempts=2)}))
    assert one != Retry(5, Linear())
    with pytest.raises(AttributeError):
        one.max_attempts = 3
    with pytest.raises(AttributeError):
        one.delay.step = 3
    hash(Retry(delay=tenacity.wait_fixed(1)))


def test_each_kind_may_have_its_own_delay():
    retry = Retry(delay=5, by_kind={"transient": Linear(), "bug": timedelta(minutes=2), "timeout": Retry(3, 7)})
    assert retry.seconds(FailureKind.TRANSIENT, 2, 0.5) == 60
    assert retry.seconds(FailureKind.BUG, 2, 0.5) == 120
    assert retry.seconds(FailureKind.TIMEOUT, 2, 0.5) == 7
    assert retry.seconds(FailureKind.AMBIGUOUS, 2, 0.5) == 5


@pytest.mark.parametrize(
    ("kind", "of_job", "expected"),
    [
        ("transient", 8, None),  # the job has the policy's number: the kind's own counts
        ("bug", 8, 2),
        ("timeout", 8, 8),  # only a delay of its own
        ("conflict", 8, 8),
        ("transient", 3, 3),  # the job was given a number: a kind can only lower it
        ("bug", 3, 2),
        ("bug", 1, 1),
        ("conflict", 3, 3),
        ("conflict", None, 8),
        ("bug", None, 2),
        ("transient", None, None),
    ],
)
def test_limits(kind, of_job, expected):
    rules = {"transient": Retry(max_attempts=None), "bug": Retry(max_attempts=2), "timeout": Linear()}
    assert Retry(max_attempts=8, by_kind=rules).limit(FailureKind(kind), of_job) == expected


def test_a_single_attempt():
    assert Retry(max_attempts=1, max_rescues=1).limit(FailureKind.BUG, 1) == 1


def test_no_end():
    assert Retry(max_attempts=None).limit(FailureKind.TRANSIENT, None) is None
    assert Retry(max_attempts=None).limit(FailureKind.TRANSIENT, 4) == 4


def test_a_conflict_waits_shortly_unless_told_otherwise():
    assert Retry(delay=300).seconds(FailureKind.CONFLICT, 1, HIGH) == pytest.approx(0.5)
    assert Retry(delay=300).seconds(FailureKind.CONFLICT, 30, HIGH) == pytest.approx(CONFLICT_DELAY.cap)
    assert Retry(delay=0).seconds(FailureKind.CONFLICT, 30, HIGH) == 0
    assert Retry(delay=0, by_kind={"conflict": 300}).seconds(FailureKind.CONFLICT, 1, HIGH) == 300


SECONDS = "is no delay: use seconds from 0 on, or a timedelta"
TIMES = "is no number of times: use an integer of at least 1"
LIKE = (
    "is no delay: use seconds, a timedelta, a strategy such as FullJitter(base=1), a function of the attempt, or one of"
)
LIKE += " tenacity's waits"
FACTOR = "would shrink the delay: use a number of at least 1, such as 2"
SHARE = "is not a share: use a number from 0 to 1, such as 0.2 for +-20 %"
KINDS = (
    "throttled, quota, auth, transient, ambiguous, conflict, permanent, reset_cursor, database, timeout, bug,"
    " lost_worker, expired, undecodable"
)
CAP = "base=10 s is longer than cap=5 s: raise the cap or lower the base"
NESTED = "by_kind['bug'] has a by_kind of its own: name its kinds in the outer one"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Retry(max_attempts=0), f"max_attempts=0 {TIMES} or None for no end"),
        (lambda: Retry(max_attempts=True), f"max_attempts=True {TIMES} or None for no end"),
        (lambda: Retry(max_attempts=2.5), f"max_attempts=2.5 {TIMES} or None for no end"),
        (lambda: Retry(max_rescues=0), f"max_rescues=0 {TIMES}"),
        (lambda: Retry(delay=-1), f"delay=-1 {SECONDS}"),
        (lambda: Retry(delay=float("nan")), f"delay=nan {SECONDS}"),
        (lambda: Retry(delay=float("inf")), f"delay=inf {SECONDS}"),
        (lambda: Retry(delay=timedelta(seconds=-1)), f"delay=-1.0 {SECONDS}"),
        (lambda: Retry(delay=True), f"delay=True {LIKE}"),
        (lambda: Retry(delay="5s"), f"delay='5s' {LIKE}"),
        (lambda: Retry(delay=None), f"delay=None {LIKE}"),
        (lambda: Retry(delay=FullJitter), "delay=FullJitter is a class: write FullJitter()"),
        (lambda: Retry(delay=tenacity.wait_fixed), "delay=wait_fixed is a class: write wait_fixed()"),
        (lambda: Retry(by_kind={"oops": 1}), f"by_kind names 'oops', which is no kind of error: use one of {KINDS}"),
        (lambda: Retry(by_kind={"bug": "x"}), f"delay='x' {LIKE}"),
        (lambda: Retry(by_kind={"bug": Retry(by_kind={"bug": 1})}), NESTED),
        (lambda: Exponential(factor=0.5), f"factor=0.5 {FACTOR}"),
        (lambda: FullJitter(factor=float("nan")), f"factor=nan {FACTOR}"),
        (lambda: FullJitter(factor="2"), f"factor='2' {FACTOR}"),
        (lambda: PlusMinus(ratio="1"), f"ratio='1' {SHARE}"),
        (lambda: FullJitter(base=10, cap=5), CAP),
        (lambda: Decorrelated(base=10, cap=5), CAP),
        (lambda: FullJitter(base=-1), f"base=-1 {SECONDS}"),
        (lambda: FullJitter(cap=-1), f"cap=-1 {SECONDS}"),
        (lambda: Decorrelated(base=-1), f"base=-1 {SECONDS}"),
        (lambda: Decorrelated(cap=-1), f"cap=-1 {SECONDS}"),
        (lambda: Fixed(-1), f"delay=-1 {SECONDS}"),
        (lambda: Linear(step="1"), f"step='1' {SECONDS}"),
        (lambda: Linear(cap=True), f"cap=True {SECONDS}"),
        (lambda: PlusMinus(ratio=1.5), f"ratio=1.5 {SHARE}"),
        (lambda: PlusMinus(ratio=-0.1), f"ratio=-0.1 {SHARE}"),
    ],
)
def test_bad_options_are_named_with_their_remedy(make, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        make()


def test_what_is_tenacitys_and_no_wait():
    with pytest.raises(InvalidInput, match="is no delay"):
        as_delay(tenacity.Future(3))


@pytest.mark.parametrize("returned", [None, "5", -1, float("nan"), True, timedelta(seconds=-1)])
def test_a_function_that_returns_no_delay_is_named(returned):
    def odd(attempt):
        return returned

    value = -1.0 if isinstance(returned, timedelta) else returned
    name = f"{test_a_function_that_returns_no_delay_is_named.__name__}.<locals>.odd"
    for delay, who in ((odd, f"{name} returned {value!r}"), (tenacity.wait_fixed(-1), "wait_fixed returned -1.0")):
        message = f"delay function {who}: return seconds from 0 on, or a timedelta"
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            as_delay(delay).seconds(1, 0.5)


def test_a_functions_delay_has_an_end():
    assert LONGEST == 366 * 24 * 3600
    assert as_delay(lambda _: 1e300).seconds(1, 0.5) == LONGEST
    assert as_delay(lambda _: float("inf")).seconds(1, 0.5) == LONGEST
    assert as_delay(tenacity.wait_exponential(multiplier=1e12)).seconds(90, 0.5) == LONGEST
