"""Good accounts beside evil ones, second by second, through what decides: evidence and circuits, no clock, no database.

Each clause of `evidence` is held by a case here that fails without it: what an evil account answers neither stops the
good ones, nor says that a provider is alive which is not; and what truly stops all is believed.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest

from resilient.core.base.errors import Failure, FailureKind, Scope
from resilient.core.gates import breaker
from resilient.core.gates.breaker import child_of, judge, names, scoped
from resilient.core.gates.policy import BreakerPolicy, Tenancy

K = FailureKind
START = datetime(2026, 11, 1, tzinfo=UTC)
POLICY = BreakerPolicy(ramp=0.0)  # how the load comes back is another's affair
GOOD, EVIL, SECONDS = 10, 4, 120
DAY = 86_400.0


@dataclass
class World:
    """One request a second of each key that no gate stops, the evil first; ``answer(key, second)``: what comes back."""

    answer: object
    tenancy: Tenancy = Tenancy.SHARED
    sent: dict = field(default_factory=dict)  # by key, the seconds in which it sent
    done: dict = field(default_factory=dict)
    circuits: dict = field(default_factory=dict)
    rests: dict = field(default_factory=dict)  # until when, by key

    def run(self, keys, seconds=SECONDS):
        for second in range(seconds):
            now = START + timedelta(seconds=second)
            for key in keys:
                self.request(key, second, now)
        return self

    def request(self, key, second, now):
        path = ["/".join(key.split("/")[: n + 1]) for n in range(key.count("/") + 1)]
        circuits = {level: self.circuits.setdefault(level, breaker.BreakerFacts()) for level in path}
        shut = [level for level, one in circuits.items() if one.state != "closed"]
        if any(self.rests.get(level, now) > now for level in path):
            return
        if not all(breaker.electable(circuits[level], now) for level in shut):
            return
        for level in shut:
            circuits[level] = self.circuits[level] = breaker.elect(circuits[level], key, POLICY, now)
        self.sent.setdefault(key, []).append(second)
        said = self.answer(key, second)
        failure, told = said if isinstance(said, tuple) else (said, None)
        if failure is None:
            self.done[key] = self.done.get(key, 0) + 1
        for level in path:
            self.report(key, level, failure, told, now, probe=level in shut)
        if told and failure.kind is K.THROTTLED:
            self.rests[scoped(failure, key, self.tenancy)] = now + timedelta(seconds=told)

    def report(self, key, level, failure, told, now, *, probe):
        verdict, child = judge(failure, key, level, self.tenancy), child_of(key, level)
        ok, failed = verdict == "ok", verdict == "failed"
        binds = told is not None and names(failure, key, level, self.tenancy)
        one = breaker.Report(
            self.circuits[level].generation, int(ok), int(failed), int(failed), probe=probe,
            children_ok=frozenset({child} if ok else ()), children_failed=frozenset({child} if failed else ()),
            floor_until=now + timedelta(seconds=told) if binds else None,
        )  # fmt: skip
        self.circuits[level] = breaker.report(self.circuits[level], one, POLICY, now, 0.0, root="/" not in level)

    def pace(self):
        """What the good accounts did, of what they do alone."""
        return sum(n for key, n in self.done.items() if "good" in key) / (GOOD * SECONDS)

    def requests(self, within="", seconds=range(SECONDS)):
        return sum(second in seconds for key, sent in self.sent.items() if within in key for second in sent)


def keys(evil, good=GOOD):
    return [*(f"api/evil-{n}" for n in range(evil)), *(f"api/good-{n}" for n in range(good))]


def evil_says(*answers):
    """The evil accounts answer these in turn, once everybody was there; the good ones well."""
    return lambda key, second: answers[second % len(answers)] if second and "evil" in key else None


def fails(kind=K.TRANSIENT, status=None, **facts):
    return Failure(kind, status=status, **facts)


OUTAGE = fails(status=503, provider_wide=True)
NO_ANSWER = fails(provider_wide=True)
DECLARED = fails(K.PERMANENT, 599, provider_wide=True, counts_for_breaker=True)
ENDPOINT = fails(status=503, scope=Scope.ENDPOINT, provider_wide=True)


# -- what evil accounts answer stops nobody else ---------------------------------------------------------------


@pytest.mark.parametrize("answer", [OUTAGE, NO_ANSWER, (OUTAGE, DAY), (fails(K.THROTTLED, 429), DAY)])
@pytest.mark.parametrize("tenancy", list(Tenancy))
def test_fewer_than_there_are_good_ones(answer, tenancy):
    assert World(evil_says(answer), tenancy).run(keys(EVIL)).pace() == 1


@pytest.mark.parametrize(
    ("tenancy", "answer"),
    [(Tenancy.APART, OUTAGE), (Tenancy.APART, NO_ANSWER), (Tenancy.SUBDOMAIN, NO_ANSWER)],
)
def test_more_than_there_are_good_ones_at_hosts_of_their_own(tenancy, answer):
    assert World(evil_says(answer), tenancy).run(keys(2 * GOOD)).pace() == 1


def test_one_with_more_endpoints_than_there_are_good_accounts():
    world = World(lambda key, _second: OUTAGE if "evil" in key else None)
    world.run([*keys(0, 2), *(f"api/evil/e{n}" for n in range(10))])
    assert world.requests("good") == 2 * SECONDS


def test_a_rest_of_the_whole_provider_told_by_a_host_of_its_own():
    rest = (fails(K.THROTTLED, 429, scope=Scope.PROVIDER), DAY)
    assert World(evil_says(rest), Tenancy.APART).run(keys(1)).pace() == 1


def test_our_own_trouble_is_nobodys_illness():
    """He fills our pool: what never left says nothing."""
    own = fails(counts_for_breaker=False, provider_wide=True)
    world = World(lambda _key, second: own if second % 60 < 10 else None).run(keys(EVIL))
    assert world.requests("good") == GOOD * SECONDS


# -- an outage of all is believed, and its end -----------------------------------------------------------------

DOWN = range(20, 60)
LATEST_END = 20  # seconds after the outage


def outage(failure, evil=None):
    """Everything is down for a while; the evil ones answer as they like then, and from there on."""

    def answer(key, second):
        if "evil" in key and evil is not None and second >= DOWN.start + 1:
            return evil
        return failure if second in DOWN else None

    return answer


def goes_on(world):
    """Whether the good accounts work again soon after the end, each at full pace."""
    after = range(DOWN.stop + LATEST_END, SECONDS)
    return world.requests("good", after) == GOOD * len(after)


@pytest.mark.parametrize(
    "failure",
    [
        OUTAGE,
        NO_ANSWER,
        fails(K.AMBIGUOUS, 504, provider_wide=True),
        DECLARED,
    ],
)
def test_an_outage_of_all_is_believed_and_over_when_it_is_over(failure):
    world = World(outage(failure)).run(keys(EVIL))
    assert world.requests(seconds=DOWN) <= GOOD + EVIL + 10
    assert goes_on(world)


@pytest.mark.parametrize("tenancy", [Tenancy.SHARED, Tenancy.SUBDOMAIN])
def test_answers_of_a_providers_own_hosts_tell_of_its_outage(tenancy):
    world = World(outage(OUTAGE), tenancy).run(keys(EVIL))
    assert world.requests(seconds=DOWN) <= GOOD + EVIL + 10
    assert goes_on(world)


@pytest.mark.parametrize("failure", [OUTAGE, fails(K.AMBIGUOUS, 504, provider_wide=True)])
def test_work_on_the_roots_own_key_opens_it(failure):
    world = World(outage(failure)).run(["api"])
    assert world.requests(seconds=DOWN) < 15


@pytest.mark.parametrize(
    "lie",
    [
        fails(K.PERMANENT, 501),
        fails(K.PERMANENT, 500),
        fails(K.THROTTLED, 503),
        fails(K.PERMANENT, 408),
        fails(K.PERMANENT),  # a certificate
        fails(K.THROTTLED, 429, scope=Scope.PROVIDER),
    ],
)
def test_no_lie_is_proof_of_life(lie):
    world = World(outage(OUTAGE, lie)).run(keys(EVIL))
    assert world.requests("good", DOWN) < GOOD / 2  # until it shows; believed, each probe would let them all in


@pytest.mark.parametrize(
    "word",
    [fails(K.THROTTLED, 429), fails(K.QUOTA, 403), fails(K.AUTH, 401), fails(K.PERMANENT, 422), fails(status=425)],
)
def test_any_answer_of_theirs_after_the_outage_is_proof_of_life(word):
    """They are asked first: the good ones need not wait until it is their turn to probe."""

    def answer(key, second):
        return OUTAGE if second in DOWN else word if "evil" in key else None

    world = World(answer).run(keys(EVIL))
    assert goes_on(world)


def test_what_a_probe_is_told_binds_the_account_that_was_told():
    def answer(key, second):
        return (OUTAGE, DAY if "evil" in key else None) if second in DOWN else None

    world = World(answer).run(keys(EVIL))
    assert goes_on(world)


def test_a_rest_of_the_whole_provider_at_the_host_of_all_is_believed():
    rest = fails(K.THROTTLED, 429, scope=Scope.PROVIDER)
    world = World(lambda key, second: (rest, 30.0) if key == "api/evil-0" and second == 50 else None)
    world.run(keys(EVIL))
    assert world.requests(seconds=range(51, 80)) == 0
    assert world.requests(seconds=range(80, SECONDS)) == (GOOD + EVIL) * (SECONDS - 80)


# -- what he does to himself -----------------------------------------------------------------------------------

FEW = 30  # requests in two minutes


@pytest.mark.parametrize("between", [fails(K.THROTTLED, 429), fails(K.QUOTA, 403), fails(K.AUTH, 401)])
def test_what_says_nothing_ends_no_streak(between):
    assert World(evil_says(OUTAGE, between, between)).run(keys(1)).requests("evil") < FEW


def test_a_refusal_is_an_answer():
    world = World(evil_says(OUTAGE, fails(K.PERMANENT, 422), fails(K.CONFLICT, 409))).run(keys(1))
    assert world.requests("evil") == SECONDS


@pytest.mark.parametrize(
    "failure",
    [fails(status=425), fails(), fails(K.PERMANENT, 422, counts_for_breaker=True), fails(K.AMBIGUOUS), OUTAGE],
)
@pytest.mark.parametrize("tenancy", list(Tenancy))
def test_his_own_circuit_opens(failure, tenancy):
    assert World(evil_says(failure), tenancy).run(keys(1)).requests("evil") < FEW


@pytest.mark.parametrize("tenancy", list(Tenancy))
@pytest.mark.parametrize("failure", [fails(status=425), OUTAGE, ENDPOINT])
def test_his_account_is_as_ill_as_its_endpoints(failure, tenancy):
    endpoints = [f"api/evil/e{n}" for n in range(10)]
    assert World(evil_says(failure), tenancy).run(endpoints).requests("evil") < 10 * 5 + FEW


@pytest.mark.parametrize("tenancy", list(Tenancy))
def test_an_endpoint_that_is_ill_leaves_its_account_well(tenancy):
    ill = fails(status=500, scope=Scope.ENDPOINT)
    world = World(lambda key, _second: ill if key.endswith("e0") else None, tenancy)
    world.run([f"api/good-1/e{n}" for n in range(4)])
    assert all(world.done[f"api/good-1/e{n}"] == SECONDS for n in (1, 2, 3))
    assert world.requests("e0") < FEW


@pytest.mark.parametrize("tenancy", list(Tenancy))
def test_an_endpoint_that_rests_leaves_its_account_at_work(tenancy):
    rest = (fails(K.THROTTLED, 429, scope=Scope.ENDPOINT), DAY)
    world = World(lambda key, _second: rest if key.endswith("e0") else None, tenancy)
    world.run([f"api/good-1/e{n}" for n in range(4)])
    assert all(world.done[f"api/good-1/e{n}"] == SECONDS for n in (1, 2, 3))
    assert world.requests("e0") == 1
