"""What throttles teach, in the rows: with the cooldown, under one lock, kept, grown by reports, forgotten."""

import itertools
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilient import Limit
from resilient.core.gates.admission import Level, admit, in_force
from resilient.core.gates.learnt import CLOSE, QUIET, Answers, Refusal, current
from resilient.core.gates.policy import Learning, Policies
from resilient.core.gates.rate_limit import LEARNT
from resilient.store.gates import controls as gates
from resilient.store.gates import limits, resources
from resilient.store.gates.controls import Report
from resilient.store.inspect import resources as shown

KEY = "p/a"


@pytest.fixture
def do(database):
    return database.transaction_sync


@pytest.fixture
def facts(do):
    return lambda key=KEY: do(resources.read, [key])[key]


def throttle(do, clock, key=KEY, *, generation=0, accepted=5, learning=None, told=1.0):
    r = Refusal(generation, told, accepted, 0.2, 3)
    until = clock.now() + timedelta(seconds=told)
    return do(gates.cool_down, key, until, "rate_limited", 0.0, refusal=r, learning=learning)


def test_a_throttle_writes_what_it_teaches_with_the_cooldown(do, clock, facts):
    cooled, news = throttle(do, clock)
    assert news
    assert facts().learnt == cooled.learnt
    assert facts().learnt.rate == pytest.approx(5 * CLOSE)
    assert facts().learnt.generation == facts().revision
    clock.advance(3600 * 24)
    assert not facts().calm, "it is looked at until a report, or somebody, forgets it"


def test_only_the_first_refusal_of_a_generation_teaches(do, clock, facts):
    throttle(do, clock)
    before = facts().learnt
    throttle(do, clock, told=20.0, accepted=1)  # one that was in flight, and told a longer rest
    after = facts().learnt
    assert (after.throttles, after.rate, after.generation) == (1, before.rate, before.generation)
    assert after.resumes_at > before.resumes_at


def test_what_others_counted_and_what_is_let_through_later_is_reported(do, clock, facts):
    throttle(do, clock, accepted=2)
    do(gates.take_in, [Report(KEY, Answers(0, 3))], Policies())
    assert facts().learnt.rate == pytest.approx(5 * CLOSE)
    revision = facts().revision
    clock.advance(3)
    do(gates.take_in, [Report(KEY, Answers(facts().learnt.generation, 4))], Policies())
    assert facts().learnt.accepted == 4
    assert facts().revision == revision, "what grows is read soon enough"


def test_a_resource_that_may_not_learn_only_begins_slowly(do, clock, facts):
    throttle(do, clock, learning=Learning(on=False))
    assert (facts().learnt.kind, facts().learnt.rate) == ("free", None)
    clock.advance(3)
    generation = facts().learnt.generation
    do(gates.take_in, [Report(KEY, Answers(generation, 40))], Policies())
    assert facts().learnt is None
    assert facts().calm


def test_a_refused_budget_and_a_refreshed_token_teach_nothing(do, clock, facts):
    do(gates.cool_down, KEY, clock.now() + timedelta(seconds=60), "budget:core", 0.0, exact=True)
    assert facts().learnt.kind == "free"
    do(gates.cool_down, "p/b", clock.now() + timedelta(seconds=5), "refreshing", 0.0, exact=True)
    assert facts("p/b").learnt is None


def test_the_end_of_a_refresh_forgets_nothing(do, clock, facts):
    throttle(do, clock)
    clock.advance(10)
    before = facts().learnt
    do(gates.cool_down, KEY, clock.now() + timedelta(seconds=5), "refreshing", 0.0, exact=True)
    do(gates.warm_up_from, KEY, "refreshing")
    assert (facts().blocked_until, facts().learnt) == (None, before)
    assert before.rate is not None


def test_a_new_lesson_begins_its_limit_anew(do, clock):
    throttle(do, clock)
    limit = Limit.learnt(5.0, 1.0, 1.0)
    ask = limits.Ask(((KEY, limit),), patience=10.0)
    do(limits.draw, [ask, ask, ask])
    assert do(limits.read, [KEY])[KEY][LEARNT].tat > clock.now().timestamp()
    clock.advance(10)
    throttle(do, clock, generation=do(resources.read, [KEY])[KEY].learnt.generation)
    assert KEY not in do(limits.read, [KEY])


@pytest.mark.parametrize("how", [gates.forget, gates.warm_up])
def test_by_hand_it_is_forgotten(do, clock, facts, how):
    throttle(do, clock)
    do(how, KEY)
    assert facts().learnt is None or facts().learnt.kind == "free"
    assert do(shown.get, KEY).learnt is None


def test_a_generation_that_was_forgotten_never_comes_again(do, clock, facts):
    throttle(do, clock)
    first = facts().learnt.generation
    do(gates.forget, KEY)
    clock.advance(10)
    throttle(do, clock)
    assert facts().learnt.generation > first


def test_what_a_herd_was_taught_is_dropped_and_older_lessons_stay(do, clock, facts):
    throttle(do, clock, "p/old")
    clock.advance(60)
    for key in ("p/a", "p/b"):
        throttle(do, clock, key)
    since = clock.now() - timedelta(seconds=10)
    do(gates.forget_burst, ["p/a", "p/b", "p/old"], since)
    assert [facts(key).learnt is None for key in ("p/a", "p/b", "p/old")] == [True, True, False]
    assert facts("p/a").blocked_until is not None, "what was told is waited out"


def test_people_are_shown_it(do, clock):
    throttle(do, clock)
    found = do(shown.get, KEY)
    assert found.learnt == {
        "kind": "rate", "rate": 4.8, "at_once": None, "in_a_window": None, "at": clock.now(), "throttles": 1,
    }  # fmt: skip
    assert found.to_json()["learnt"]["rate"] == 4.8


@pytest.mark.parametrize("doc", ["[]", '{"kind": "newer"}', '"text"', '{"kind": "rate", "rate": "fast"}'])
def test_a_spoilt_lesson_stops_nobody(do, clock, facts, doc, database):
    throttle(do, clock)

    def spoil(c, d):
        cast = "CAST(:doc AS json)" if d.is_postgresql else ":doc"
        d.run(c, f"UPDATE {{resource}} SET learnt = {cast} WHERE key = :key", {"doc": doc, "key": KEY})

    do(spoil)
    assert facts().learnt is None
    clock.advance(10)
    throttle(do, clock)
    assert facts().learnt.kind == "rate"


PATHS = [
    (lambda do, _, key: do(gates.pause, key), gates.resume, ()),
    (lambda do, _, key: do(gates.set_auth, key, "needs_reauth"), gates.set_auth, ("ok",)),
    (lambda do, clock, key: throttle(do, clock, key, learning=Learning(on=False)), gates.warm_up, ()),
]


@pytest.mark.parametrize("key", [KEY, "p"])
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(("stop", "go", "words"), PATHS, ids=["resume", "reconnect", "warm_up"])
def test_after_every_stop_the_load_comes_back_step_by_step(do, clock, facts, key, declared, stop, go, words):
    """A key and a root, with a declared limit and without, whatever stopped it."""
    policies = Policies(limits={key: [Limit(1000, 1, burst=1000)]} if declared else None)
    stop(do, clock, key)
    clock.advance(1)
    do(go, key, *words)
    assert room(facts(key), policies, clock) == 1
    do(gates.take_in, [Report(key, Answers(facts(key).learnt.generation, 3))], policies)
    assert room(facts(key), policies, clock) == 4
    do(gates.take_in, [Report(key, Answers(facts(key).learnt.generation, 40))], policies)
    assert room(facts(key), policies, clock) == 100
    assert facts(key).learnt is None, "nothing is kept of it"


def test_a_pause_with_an_end_is_a_stop_too_and_keeps_what_was_learnt(do, clock, facts):
    throttle(do, clock)
    rate = facts().learnt.rate
    clock.advance(60)
    do(gates.pause, KEY, until=clock.now() + timedelta(seconds=30))
    clock.advance(31)
    assert room(facts(), Policies(), clock) == 1
    assert facts().learnt.rate == rate


def test_what_was_not_stopped_does_not_begin_anew(do, facts):
    for go, words in ((gates.resume, ()), (gates.warm_up, ()), (gates.set_auth, ("ok",))):
        do(go, KEY, *words)
        assert facts().learnt is None


def room(facts, policies, clock):
    """How many of a hundred jobs may start."""
    level = Level(facts, in_force(policies.for_key(facts.key), facts.learnt, clock.now()), {})
    return admit([level], 100, clock.now(), "w").count


BUDGETS = [f"b{n}" for n in range(gates.MOST_BUDGETS + 4)]
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("throttled"), st.sampled_from(BUDGETS), st.sampled_from([1.0, 9.0, 60.0])),
        st.tuples(st.just("answered"), st.sampled_from(BUDGETS), st.just(0.0)),
        st.tuples(st.just("quiet"), st.just(""), st.sampled_from([5.0, 90.0, 2 * QUIET])),
    ),
    max_size=40,
)
ACCOUNTS = itertools.count()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.permutations(BUDGETS), max_size=2), ACTS)
def test_a_throttled_budget_slows_no_other_and_the_ninth_is_its_accounts(do, clock, floods, acts):
    """``floods``: all are throttled, one after the other, and then nothing happens for long."""
    flood = [[*(("throttled", name, 1.0) for name in names), ("quiet", "", 2 * QUIET)] for names in floods]
    account = f"p/a{next(ACCOUNTS)}"
    keys = [account, *(f"{account}/budget:{name}" for name in BUDGETS)]

    def gates_of():
        drawn = do(lambda c, d: list(d.run(c, "SELECT resource_key, name, tat FROM {rate_limit}")))
        found = do(resources.read, keys)
        facts = {key: found.get(key, resources.ResourceFacts(key)) for key in keys}
        return {
            key: (one.learnt, one.blocked_until, [row for row in drawn if row[0] == key]) for key, one in facts.items()
        }

    def taught(of):
        return {key for key in keys[1:] if current(of[key][0], clock.now().timestamp()) is not None}

    for act, name, seconds in [*itertools.chain(*flood), *acts]:
        key, before = f"{account}/budget:{name}", gates_of()
        if act == "quiet":
            clock.advance(seconds)
            continue
        learnt, known, may_change = before[key][0], taught(before), key
        generation = 0 if learnt is None else learnt.generation
        if act == "answered":
            do(gates.take_in, [Report(key, Answers(generation, 3, 1))], Policies())
        else:
            may_change = key if key in known or len(known) < gates.MOST_BUDGETS else account
            assert throttle(do, clock, key, generation=generation, told=seconds)[0].key == may_change
        after = gates_of()
        assert [one for one in keys if after[one] != before[one]] in ([], [may_change])
        assert len(taught(after)) <= gates.MOST_BUDGETS
