"""Each span of the engine's: its name, kind, attributes, parent and links, by the SDK's in-memory exporter."""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import pytest
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState

from resilient.core.base import tracing
from resilient.core.base.errors import InvalidInput
from resilient.core.base.tracing import Span, Tracing, current, current_id, forget_current

ONE = f"00-{1:032x}-{2:016x}-01"


@pytest.fixture(autouse=True)
def in_no_span():
    """What is made once for a program is made for each test, which is in no span and leaves none behind."""
    tracing._api.cache_clear()
    token = contexts.attach(contexts.Context())
    yield
    contexts.detach(token)
    tracing._api.cache_clear()


class Spans:
    """A tracer's provider, and what it has exported."""

    def __init__(self, sampler=ALWAYS_ON):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(self.provider)

    def within(self):
        """A span of the program's own, as the current one."""
        return self.provider.get_tracer("program").start_as_current_span("own")

    def one(self, name):
        (span,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return span


class Asked(Sampler):
    """A sampler that keeps what it is asked with."""

    def __init__(self):
        self.attributes = []

    def should_sample(self, *asked):
        attributes = asked[4]
        self.attributes.append(dict(attributes or {}))
        return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes)

    def get_description(self):
        return "Asked"


class Task:
    """What runs."""

    unseen = None


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture
def run():
    """What runs now."""
    task = Task()
    token = tracing.running.set(task)
    yield task
    tracing.running.reset(token)


def inside(flags=1, state=None, number=1):
    """Make a span current that came from elsewhere."""
    place = SpanContext(number, 2, is_remote=True, trace_flags=TraceFlags(flags), trace_state=TraceState(state))
    contexts.attach(trace.set_span_in_context(NonRecordingSpan(place)))


def is_outside():
    return trace.get_current_span() is trace.INVALID_SPAN


# -- the program's span -----------------------------------------------------------------------------------------------


def test_outside_of_every_span_there_is_no_context():
    assert current() == (None, None)
    assert current_id() is None


@pytest.mark.parametrize(
    ("flags", "state", "told"),
    [
        (1, None, (ONE, None)),
        (0, None, (ONE[:-1] + "0", None)),
        (0x1F, [("a", "b")], (ONE[:-2] + "1f", "a=b")),
        (1, [("a", "b"), ("c", "d")], (ONE, "a=b,c=d")),
        (1, [("k", "v" * 253)], (ONE, "k=" + "v" * 253)),
        (1, [("k", "v" * 254)], (ONE, None)),
    ],
)
def test_a_context_is_told_as_headers_write_it(flags, state, told):
    inside(flags, state)
    assert current() == told
    assert current_id() == "0" * 31 + "1"


def test_a_program_that_never_imported_the_api_is_in_no_span(monkeypatch):
    inside()
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert current() == (None, None)
    assert current_id() is None
    forget_current()
    monkeypatch.undo()
    assert current_id() is not None, "nothing was imported in order to forget it"


def test_what_is_forgotten_is_current_no_more(spans):
    with spans.within():
        token = contexts.attach(contexts.get_current())
        forget_current()
        assert is_outside()
        contexts.detach(token)


# -- a span -----------------------------------------------------------------------------------------------------------


def test_a_span_is_current_between_entering_and_leaving(spans, caplog):
    span = spans.tracing.process("push", ())
    span.leave()
    assert is_outside()
    span.enter()
    assert f"-{current_id()}-" in span.headers()["traceparent"]
    span.leave()
    assert is_outside()
    inside()
    span.leave()
    assert not is_outside(), "left once"
    assert caplog.records == []


def test_a_span_knows_whether_anybody_will_see_it():
    assert Spans().tracing.process("push", ()).is_recorded is True
    assert Spans(ALWAYS_OFF).tracing.process("push", ()).is_recorded is False


def test_a_note_sets_what_is_known(spans, caplog):
    span = spans.tracing.request("GET", dict)
    span.note({"a": 1, "b": None, "c": ""})
    span.end()
    span.note({"late": 1})
    span.end()
    assert dict(spans.one("GET").attributes) == {"a": 1, "c": ""}
    assert caplog.records == [], "what comes after the end is no mistake"


@pytest.mark.parametrize(
    ("args", "options", "text", "event"),
    [
        (("timeout",), {}, None, None),
        (("timeout", "after 5 s"), {}, "after 5 s", {"exception.type": "timeout", "exception.message": "after 5 s"}),
        (("http",), {"name": "KeyError"}, None, {"exception.type": "KeyError"}),
        (("http", "", "line 1"), {}, None, {"exception.type": "http", "exception.stacktrace": "line 1"}),
        (
            ("http", "t" * 1001, "line 1"), {"name": "KeyError"}, "t" * 1000,
            {"exception.type": "KeyError", "exception.message": "t" * 1001, "exception.stacktrace": "line 1"},
        ),
    ],
)  # fmt: skip
def test_a_failure_has_a_kind_and_what_may_be_told_of_it(spans, args, options, text, event):
    span = spans.tracing.request("GET", dict)
    span.fail(*args, **options)
    span.end()
    told = spans.one("GET")
    assert dict(told.attributes) == {"error.type": args[0]}
    assert (told.status.status_code, told.status.description) == (StatusCode.ERROR, text)
    assert [(one.name, dict(one.attributes)) for one in told.events] == ([("exception", event)] if event else [])


def test_what_happens_within_a_span_is_an_event_of_it(spans):
    span = spans.tracing.request("GET", dict)
    span.event("retried", {"times": 2})
    span.end()
    (event,) = spans.one("GET").events
    assert (event.name, dict(event.attributes)) == ("retried", {"times": 2})


@pytest.mark.parametrize(
    ("state", "headers"),
    [(None, {"traceparent": ONE}), ([("a", "b")], {"traceparent": ONE, "tracestate": "a=b"})],
)
def test_a_request_carries_the_context_of_its_span(state, headers):
    inside(state=state)
    assert Span(trace.get_current_span()).headers() == headers
    assert Span(trace.INVALID_SPAN).headers() == {}


def test_a_block_is_within_its_span_and_ends_it(spans):
    with spans.within() as own:
        with spans.tracing.enqueue("push") as span:
            assert f"-{current_id()}-" in span.headers()["traceparent"]
            assert trace.get_current_span() is not own
        assert trace.get_current_span() is own
    told = spans.one("enqueue push")
    assert told.parent.span_id == own.get_span_context().span_id
    assert told.status.status_code == StatusCode.UNSET


def test_a_block_that_raises_tells_the_type_alone(spans):
    class Secretive(Exception):
        pass

    with pytest.raises(Secretive), spans.tracing.enqueue("push"):
        raise Secretive("canary")
    told = spans.one("enqueue push")
    assert told.attributes["error.type"] == Secretive.__qualname__
    assert told.status.status_code == StatusCode.ERROR
    assert (told.status.description, told.events) == (None, ())
    assert is_outside()


# -- who starts them --------------------------------------------------------------------------------------------------


class Counting:
    """A provider that keeps what it is asked for."""

    def __init__(self):
        self.asked = []

    def get_tracer(self, *names, **options):
        self.asked.append((names, options))
        return object()


def test_by_default_every_run_is_told_and_nothing_of_tenants():
    plain = Tracing()
    assert (plain.tenants, plain.share) == (False, 1)
    assert 0 <= plain.roll() < 1
    assert Tracing(tenants=True, share=0.25).tenants is True
    assert [Tracing(share=share).share for share in (0, 0.25, 1)] == [0, 0.25, 1]


def test_a_share_that_is_none_is_refused_in_words():
    with pytest.raises(InvalidInput) as caught:
        Tracing(share=1.5)
    assert str(caught.value) == "Tracing(share=1.5): it is from 0 (no run) to 1 (every run)"


def test_a_tracer_is_made_once_for_a_provider():
    provider = Counting()
    mine = Tracing(provider)
    assert mine.tracer() is mine.tracer() is not None
    assert provider.asked == [(("resilient", version("resilient-engine")), {"schema_url": tracing.SCHEMA_URL})]
    assert Tracing(provider, enabled=False).tracer() is None


def test_a_copy_that_was_never_installed_has_no_version(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(tracing, "version", missing)
    provider = Counting()
    Tracing(provider).tracer()
    assert provider.asked[0][0] == ("resilient", "")


@pytest.mark.parametrize("idle", [trace.NoOpTracerProvider, trace.ProxyTracerProvider])
def test_a_provider_of_the_apis_own_records_nothing(idle):
    assert Tracing(idle()).tracer() is None


def test_the_programs_provider_is_looked_for_until_there_is_one(monkeypatch):
    mine = Tracing()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert mine.tracer() is None
    first, second = Counting(), Counting()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", first)
    assert mine.tracer() is mine.tracer() is not None
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", second)
    assert mine.tracer() is not None
    assert (len(first.asked), len(second.asked)) == (1, 1)
    own = Counting()
    Tracing(own).tracer()
    assert (len(own.asked), len(second.asked)) == (1, 1), "its own before the program's"


@pytest.mark.parametrize("is_named", [True, False])
def test_the_environment_is_asked_only_where_it_names_a_provider(monkeypatch, is_named):
    made = Counting()
    monkeypatch.setattr(tracing, "_IS_NAMED", is_named)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made)
    assert (Tracing().tracer() is not None) is is_named
    assert len(made.asked) == is_named
    other = Counting()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", other)
    assert Tracing().tracer() is not None
    assert len(other.asked) == 1, "the one that there is"


def test_an_api_that_keeps_its_provider_elsewhere_is_asked(monkeypatch):
    made = Counting()
    monkeypatch.delattr(trace, "_TRACER_PROVIDER")
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made)
    assert Tracing().tracer() is not None
    assert len(made.asked) == 1


@pytest.mark.parametrize("module", [None, ModuleType("opentelemetry.trace")], ids=["missing", "half imported"])
def test_without_the_api_there_is_no_tracer(monkeypatch, module):
    if module is None:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    else:
        monkeypatch.setitem(sys.modules, "opentelemetry.trace", module)
    assert Tracing().tracer() is None


# -- what a job keeps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "state", "kept"),
    [
        (1, None, {"traceparent": ONE}),
        (1, [("a", "b")], {"traceparent": ONE, "tracestate": "a=b"}),
        (0x11, None, {"traceparent": ONE[:-2] + "11"}),
        (0x1F, None, {"traceparent": ONE[:-2] + "1f"}),
        (0, None, None),
        (2, None, None),
    ],
)
def test_a_job_keeps_the_context_of_a_span_that_is_collected(spans, flags, state, kept):
    assert spans.tracing.document() is None
    inside(flags, state)
    text = spans.tracing.document()
    assert (None if text is None else json.loads(text)) == kept
    assert Tracing(spans.provider, enabled=False).document() is None


def test_without_a_tracer_there_are_no_spans():
    off = Tracing(Counting(), share=0, enabled=False)
    for block in (off.enqueue("a"), off.create("a"), off.send("a", {}), off.refresh("a")):
        with block as span:
            assert span is None
    assert (off.process("a", [{"traceparent": ONE}]), off.request("GET", dict), off.leaves_out()) == (None, None, False)
    assert is_outside()


# -- each of them -----------------------------------------------------------------------------------------------------


def words(operation, kind, destination):
    return {
        "messaging.system": "resilient", "messaging.operation.name": operation, "messaging.operation.type": kind,
        "messaging.destination.name": destination,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("begin", "name", "kind", "attributes"),
    [
        (lambda it: it.enqueue("push"), "enqueue push", SpanKind.PRODUCER, words("enqueue", "send", "push")),
        (lambda it: it.create("placed"), "create placed", SpanKind.PRODUCER, words("create", "create", "placed")),
        (lambda it: it.send("crm", {}), "send crm", SpanKind.CLIENT, words("send", "send", "crm")),
    ],
)
def test_a_block_has_a_name_a_kind_and_attributes(spans, begin, name, kind, attributes):
    with spans.within() as own, begin(spans.tracing):
        pass
    span = spans.one(name)
    assert (span.kind, dict(span.attributes), span.links) == (kind, attributes, ())
    assert span.parent.span_id == own.get_span_context().span_id
    assert span.instrumentation_scope.name == "resilient"


def test_a_refresh_is_a_trace_of_its_own(spans):
    """It serves every job of the account, whichever asked for it first."""
    with spans.within(), spans.tracing.refresh("github"):
        pass
    span = spans.one("refresh github")
    assert (span.kind, span.parent, span.links) == (SpanKind.CLIENT, None, ())
    assert dict(span.attributes) == {"http.request.method": "POST", "resilient.provider": "github"}


@pytest.mark.parametrize(("count", "more"), [(None, {}), (3, {"messaging.batch.message_count": 3})])
def test_a_run_is_a_trace_of_its_own_with_links(spans, count, more):
    with spans.within():
        spans.tracing.process("push", [{"traceparent": ONE}], count=count).end()
    span = spans.one("process push")
    assert (span.kind, span.parent) == (SpanKind.CONSUMER, None)
    assert dict(span.attributes) == words("process", "process", "push") | more
    assert [(one.context.trace_id, one.context.span_id) for one in span.links] == [(1, 2)]


def test_a_sending_is_linked_to_the_publishing(spans):
    with spans.tracing.send("crm", {"traceparent": ONE}):
        pass
    assert [one.context.trace_id for one in spans.one("send crm").links] == [1]


# -- a request --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_within", [True, False])
def test_a_request_is_described_before_a_sampler_is_asked(is_within):
    asked = Asked()
    spans = Spans(asked)
    if is_within:
        inside()
    spans.tracing.request("GET", lambda: {"a": 1}).end()
    span = spans.one("GET")
    assert (asked.attributes, dict(span.attributes), span.kind) == ([{"a": 1}], {"a": 1}, SpanKind.CLIENT)
    assert (span.parent.span_id if span.parent else None) == (2 if is_within else None)


def test_below_what_is_not_sampled_a_request_is_described_for_those_that_collect_it():
    described = []

    def describe():
        described.append(1)
        return {"a": 1}

    inside(flags=0)
    assert Spans(ParentBased(ALWAYS_ON)).tracing.request("GET", describe).is_recorded is False
    assert described == []
    asked = Asked()
    spans = Spans(asked)
    spans.tracing.request("GET", describe).end()
    span = spans.one("GET")
    assert (asked.attributes, dict(span.attributes), span.kind) == ([{}], {"a": 1}, SpanKind.CLIENT)


# -- links ------------------------------------------------------------------------------------------------------------


def linked(*traces):
    """What a run is linked to."""
    spans = Spans()
    spans.tracing.process("push", traces).end()
    return [one.context for one in spans.one("process push").links]


@pytest.mark.parametrize(
    "trace_",
    [
        None, [1], "text", {}, {"traceparent": 7}, {"traceparent": None}, {"traceparent": "nonsense"},
        {"traceparent": ONE + "x"}, {"traceparent": f"00-{0:032x}-{2:016x}-01"}, {"traceparent": ONE.upper() + "-XX"},
    ],
)  # fmt: skip
def test_what_is_no_context_is_no_link_and_keeps_none_out(trace_):
    assert [one.trace_id for one in linked(trace_, {"traceparent": ONE})] == [1]


def test_each_context_is_linked_once():
    other = f"00-{1:032x}-{3:016x}-01"
    found = linked(*({"traceparent": one} for one in (ONE, other, ONE)))
    assert [(one.trace_id, one.span_id) for one in found] == [(1, 2), (1, 3)]


@pytest.mark.parametrize(("given", "kept"), [(127, 127), (128, 128), (129, 128)])
def test_a_run_has_as_many_links_as_sdks_keep(given, kept):
    traces = [{"traceparent": f"00-{n:032x}-{n:016x}-01"} for n in range(1, given + 1)]
    assert [one.context.trace_id for one in tracing._links(traces)] == list(range(1, kept + 1))


@pytest.mark.parametrize(
    ("trace_", "flags", "state"),
    [
        ({"traceparent": ONE}, 1, ""),
        ({"traceparent": ONE[:-2] + "1f"}, 0x1F, ""),
        ({"traceparent": ONE[:-2] + "00"}, 0, ""),
        ({"traceparent": ONE, "tracestate": "a=b"}, 1, "a=b"),
        ({"traceparent": ONE, "tracestate": 7}, 1, ""),
        ({"traceparent": "01" + ONE[2:] + "-more"}, 1, ""),
    ],
)
def test_a_link_has_all_that_the_row_says(trace_, flags, state):
    (found,) = linked(trace_)
    assert (found.trace_id, found.span_id, int(found.trace_flags), found.is_remote) == (1, 2, flags, True)
    assert found.trace_state.to_header() == state


def test_a_large_id_is_read_whole():
    numbers = 2**128 - 2, 2**64 - 3
    (found,) = linked({"traceparent": f"00-{numbers[0]:032x}-{numbers[1]:016x}-01"})
    assert (found.trace_id, found.span_id) == numbers


# -- what is left out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "roll", "is_left_out"),
    [(1, 1, False), (0.5, 0.499, False), (0.5, 0.5, True), (0.5, 0.9, True), (0, 0.0, True)],
)
def test_chance_leaves_out_the_rest_of_a_share(spans, run, share, roll, is_left_out):
    mine = Tracing(spans.provider, share=share)
    mine.roll = lambda: roll
    assert mine.leaves_out() is is_left_out
    assert (current_id() is not None) is is_left_out


def test_a_run_that_nobody_sees_has_ids_of_its_own(spans, run):
    Tracing(spans.provider, share=0).leaves_out()
    first, state = current()
    assert current()[0] == first
    assert (first[-3:], state) == ("-00", None), "it is not sampled"
    assert trace.get_current_span().get_span_context().is_remote is False
    assert spans.tracing.document() is None
    token = tracing.running.set(Task())
    assert first[3:35] != current_id() is not None, "another run"
    tracing.running.reset(token)
    assert current()[0] == first


def test_beyond_its_run_the_context_is_in_no_span(spans):
    Tracing(spans.provider, share=0).leaves_out()
    assert current() == (None, None)


@pytest.mark.parametrize(("bits", "ids"), [(lambda _: 0, (1, 1)), (lambda n: 2**n - 1, (2**128 - 1, 2**64 - 1))])
def test_ids_are_as_long_as_the_standard_says_and_never_zero(spans, run, monkeypatch, bits, ids):
    monkeypatch.setattr(tracing, "getrandbits", bits)
    Tracing(spans.provider, share=0).leaves_out()
    found = trace.get_current_span().get_span_context()
    assert (found.trace_id, found.span_id) == ids


def test_what_is_left_out_takes_nothing_along(spans, run):
    """The context of whoever asked first is not that of all runs."""
    contexts.attach(contexts.set_value("baggage", "theirs"))
    Tracing(spans.provider, share=0).leaves_out()
    assert contexts.get_value("baggage") is None
