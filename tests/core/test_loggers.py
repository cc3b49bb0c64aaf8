"""What a line of the log shows of somebody else's text, how long it is, and whose job it says it is about."""

import logging
import sys

import pytest
from opentelemetry import trace

from resilient.core.base import loggers
from resilient.core.base.loggers import (
    MASK,
    FailureLog,
    apart,
    label_records,
    log_fields,
    logger,
    make_harmless,
    masked,
    urls,
)
from resilient.core.base.tracing import current_id, running


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no address", "no address"),
        ("GET https://u:pw@api.example/x?key=1&to=2#top failed", "GET https://api.example/x?key=…&to=… failed"),
        (
            "'amqp://u:pw@broker/v' and HTTPS://u:pw@API.example/?k=v",
            "'amqp://broker/v' and HTTPS://API.example/?k=…",
        ),
    ],
)
def test_addresses_show_no_users_and_no_values(text, shown):
    assert urls(text) == masked(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abcdefgh.ijk=", f"Authorization: Bearer {MASK}"),
        ("basic dXNlcjpwdw==, then", f"basic {MASK}, then"),
        ("Bearer short", "Bearer short"),
        ("password=hunter2 and more", f"password={MASK} and more"),
        ("{'api_key': 'a b c', 'x': 1}", "{'api_key': [hidden], 'x': 1}"),
        ('"client_secret": "a b c"', '"client_secret": [hidden]'),
        ("password: wrong", "password: wrong"),
        (r"password='a\'canary b' host=x", f"password={MASK} host=x"),
        (r'{"password": "a\"canary b", "a": 1}', f'{{"password": {MASK}, "a": 1}}'),
        ("password='canary\\", f"password={MASK}"),
        ("UID=u;PWD=canary with blanks;Server=h", f"UID=u;PWD={MASK};Server=h"),
        ("PWD={canary with blanks};Server=h", f"PWD={MASK};Server=h"),
        (
            "DB_PASSWORD=canary PGPASSWORD=canary x-api-key=canary",
            f"DB_PASSWORD={MASK} PGPASSWORD={MASK} x-api-key={MASK}",
        ),
        ("next_token=abc and max_tokens=5", "next_token=abc and max_tokens=5"),
        ("the token expired, Basic realm=x", "the token expired, Basic realm=x"),
        ("Bearer token missing; a token endpoint", "Bearer token missing; a token endpoint"),
    ],
)
def test_what_follows_the_usual_words_is_hidden(text, shown):
    assert masked(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:canary two@host/db is away", "postgresql://host/db is away"),
        ("'redis://:123 canary@h/0'", "'redis://h/0'"),
        ("a mssql://DOM User:canary@h/x, b amqp://x:y canary@k/ c", "a mssql://h/x, b amqp://k/ c"),
        ("open //u:canary@h:5432/x failed", "open //h:5432/x failed"),
        ("('//u:can/ary@h')", "('//h')"),
    ],
)
def test_a_login_with_a_blank_and_one_without_a_scheme_are_hidden(text, shown):
    assert masked(text) == urls(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "redis://host:6379 for bob@x.org",
        "redis://cache went away: mail bob@x.org",
        "postgresql://host/db and bob@x.org",
        "http://host:80/path for a:b@c",
        "//host:80/x@y",
        "x = 5 //comment: bob@x",
        "open sqlite:////data/b@c/app.db failed",
        "sqlite+aiosqlite:///C:/Users/bob@corp/app.db",
        "nats://h1:4222,nats://h2:4222",
    ],
)
def test_what_is_no_login_is_shown(text):
    assert masked(text) == text


# -- records -----------------------------------------------------------------------------------------------------------


class Rude:
    def __str__(self):
        raise KeyError("no")


def record_of(template, *args, error=None):
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("resilient.x", logging.INFO, "x.py", 7, template, args, info)
    assert make_harmless(record) is True
    return record


def test_a_logger_of_a_floor_makes_its_records_harmless():
    log = logger("a_room")
    assert (log.name, log) == ("resilient.a_room", logging.getLogger("resilient.a_room"))
    assert log.filters == [make_harmless]
    assert logger("a_room").filters == [make_harmless]


@pytest.mark.parametrize(
    ("template", "args", "message"),
    [
        ("%s and %s", ("two\nlines", "\x1b[31mred"), r"two lines and \x1b[31mred"),
        ("%d, %.1f, %s, %s", (3, 2.5, True, None), "3, 2.5, True, None"),
        ("%s", (["token=hunter2pass"],), "['token=[hidden]']"),
        ("%s", (Rude(),), "Rude (its text cannot be had: KeyError)"),
        ("%(who)s: %(count)03d", ({"who": "a\nb", "count": 7},), "a b: 007"),
        ("nothing", (), "nothing"),
    ],
)
def test_each_argument_is_one_harmless_line(template, args, message):
    record = record_of(template, *args)
    assert record.getMessage() == message
    assert record.exc_text is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x" * 2000, "x" * 2000),
        ("x" * 2001, "x" * 1999 + "…"),
        ("\x00" * 2000, "\\x00" * 500),  # longer only once it is written out
        ("x" * 1995 + " password=hunter2", "x" * 1995 + " pas…"),
    ],
)
def test_a_long_argument_is_cut(text, shown):
    message = record_of("%s", text).getMessage()
    assert message[:2000] == shown
    assert text[:2000] == text or message == shown


@pytest.mark.parametrize("before", range(1960, 2000, 7))
def test_a_cut_shows_no_half_of_a_password(before):
    url = " postgresql://user:S3cretS3cretS3cret@host/db"
    assert "S3c" not in record_of("%s", "x" * before + url).getMessage()
    trace = record_of(
        "failed", error=raised(ValueError(f"{'z ' * 9000}{url} {'y' * (16_384 + before - 2000)}"))
    ).exc_text
    assert "cret" not in trace
    assert trace.endswith("yyyy")


def test_the_edge_of_what_is_masked_shows_no_half_of_a_password():
    secrets = " ".join(f"password={'p' * 400}" for _ in range(40))
    assert "ppp" not in record_of("%s", secrets).getMessage()


def raised(error):
    try:
        raise error
    except ValueError as caught:
        return caught


def test_a_traceback_is_indented_and_harmless_and_the_exception_stays():
    error = raised(ValueError("token=hunter2pass\n2026 CRITICAL \x1b[31m"))
    record = record_of("failed", error=error)
    assert record.exc_info[1] is error
    lines = record.exc_text.split("\n")
    assert lines[0] == "    Traceback (most recent call last):"
    assert lines[1].startswith(f'      File "{__file__}", line ')
    assert lines[-2:] == ["    ValueError: token=[hidden]", r"    2026 CRITICAL \x1b[31m"]


def test_of_a_long_traceback_the_end_is_kept():
    text = record_of("failed", error=raised(ValueError("x" * 20_000))).exc_text
    assert text == "    " + "x" * (16 * 1024 - 1)  # and the last line's end


def test_a_traceback_that_cannot_be_had_says_so(monkeypatch):
    def fails(_error):
        raise KeyError("no")

    monkeypatch.setattr(loggers.traceback, "format_exception", fails)
    text = record_of("failed", error=raised(ValueError("x"))).exc_text
    assert text == "    ValueError (its traceback cannot be had: KeyError)"


def test_an_exception_that_was_never_raised_has_words_all_the_same():
    assert record_of("failed", error=ValueError("x")).exc_text == "    ValueError: x"


def test_a_traceback_that_was_written_stays():
    record = logging.LogRecord("x", logging.INFO, "x.py", 7, "failed", (), (ValueError, ValueError("x"), None))
    record.exc_text = "as it was"
    assert make_harmless(record) is True
    assert record.exc_text == "as it was"


def test_nothing_that_is_being_handled_leaves_no_traceback():
    record = logging.LogRecord("x", logging.INFO, "x.py", 7, "failed", (), sys.exc_info())
    assert make_harmless(record) is True
    assert record.exc_text is None


# -- failures that last ------------------------------------------------------------------------------------------------


def test_a_failure_that_lasts_is_told_when_it_begins_and_when_it_ends(caplog):
    caplog.set_level(logging.DEBUG)
    log = FailureLog(logger("a_room"), "it works: 100 %d\nagain")
    log.worked()
    log.failed("no %s", "disk")
    log.failed("no %s", "net")
    log.worked()
    log.worked()
    log.failed("no %s", "disk")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "no disk"),
        ("DEBUG", "no net"),
        ("WARNING", "it works: 100 %d again"),
        ("WARNING", "no disk"),
    ]


# -- whose record it is ------------------------------------------------------------------------------------------------


class Run:
    unseen = None

    def log_fields(self):
        return {"job_id": "1", "kind": "mail.send", "resource_key": "smtp/a", "attempt": 2}


SPAN = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False))
TRACE_ID = f"{0xABC:032x}"


@pytest.fixture
def job():
    token = running.set(Run())
    with trace.use_span(SPAN):
        yield
    running.reset(token)


@pytest.fixture
def factory():
    """The factory of records that is there; it is put back."""
    made = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    yield
    logging.setLogRecordFactory(made)


def labels():
    record = logging.getLogger("shop").makeRecord("shop", logging.INFO, "x.py", 7, "sold %d", (3,), None)
    assert record.getMessage() == "sold 3"
    return {name: value for name, value in vars(record).items() if name.startswith("resilient_")}


NAMES = ("resilient_job_id", "resilient_kind", "resilient_resource_key", "resilient_attempt", "resilient_trace_id")


@pytest.mark.usefixtures("factory")
def test_every_record_has_labels_and_outside_of_a_job_they_are_empty():
    assert labels() == {}
    label_records()
    assert labels() == dict.fromkeys(NAMES)
    with trace.use_span(SPAN):
        assert labels() == {**dict.fromkeys(NAMES), "resilient_trace_id": TRACE_ID}


@pytest.mark.usefixtures("factory", "job")
def test_within_a_job_they_say_which_and_in_which_trace():
    label_records()
    assert labels() == dict(zip(NAMES, ("1", "mail.send", "smtp/a", 2, TRACE_ID), strict=True))


@pytest.mark.usefixtures("factory")
def test_the_factory_that_was_there_makes_the_records_and_is_wrapped_once():
    made = []

    def make(*args, **words):
        made.append(logging.LogRecord(*args, **words))
        return made[-1]

    logging.setLogRecordFactory(make)
    label_records()
    label_records()
    record = logging.getLogRecordFactory()("x", logging.INFO, "x.py", 7, "hello", (), None, sinfo="stack")
    assert made == [record]
    assert (record.name, record.stack_info, record.resilient_kind) == ("x", "stack", None)


@pytest.mark.usefixtures("job")
def test_a_program_may_ask_for_the_labels_of_its_job():
    fields = {"job_id": "1", "kind": "mail.send", "resource_key": "smtp/a", "attempt": 2}
    assert log_fields() == {**fields, "trace_id": TRACE_ID}


def test_outside_of_a_job_there_are_no_labels():
    with trace.use_span(SPAN):
        assert log_fields() == {}


@pytest.mark.usefixtures("job")
def test_what_many_jobs_use_begins_apart_from_the_job():
    context = apart()
    assert (context.run(log_fields), context.run(current_id)) == ({}, None)
    assert (log_fields()["job_id"], current_id()) == ("1", TRACE_ID)


def test_outside_of_a_job_it_begins_in_the_programs_span():
    with trace.use_span(SPAN):
        assert apart().run(current_id) == TRACE_ID
