"""What people read."""

import json
import time
import unicodedata
from datetime import UTC, datetime, timedelta, timezone

import pytest

from resilient.core.base.phrases import (
    brief,
    counted,
    error_line,
    figure,
    fits_header,
    in_json,
    learnt_limit,
    length,
    moment,
    nearest,
    one_line,
    plain,
    rough,
    span,
    when,
)

# Default_Ignorable_Code_Point of Unicode 15.1, DerivedCoreProperties.txt
IGNORABLE = {
    0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFEFF, 0xFFA0, *range(0x180B, 0x1810),
    *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2070), *range(0xFE00, 0xFE10),
    *range(0xFFF0, 0xFFF9), *range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B), *range(0xE0000, 0xE1000),
}  # fmt: skip
SEEN = {ord("\t"), ord("\n")}


@pytest.mark.parametrize(
    ("kind", "code", "message", "line"),
    [
        ("permanent", "http_422", "POST /x answered 422: no", "permanent http_422: POST /x answered 422: no"),
        ("bug", "ValueError", "ValueError: odd", "bug ValueError: odd"),
        ("transient", "circuit_open", "circuit open", "transient: circuit open"),
        ("timeout", None, "took longer", "timeout: took longer"),
        ("bug", "KeyError", "", "bug KeyError"),
        ("throttled", None, "throttled", "throttled"),
        ("throttled", "http_429", "throttled", "throttled http_429"),
        (None, None, "a remark\nand more", "a remark"),
    ],
)
def test_an_error_in_one_line_says_each_word_once(kind, code, message, line):
    assert error_line(kind, code, message) == line


def test_a_long_error_is_cut_in_its_line():
    assert error_line("bug", "KeyError", "x" * 160) == "bug KeyError: " + "x" * 160
    assert error_line("bug", "KeyError", "x" * 161) == "bug KeyError: " + "x" * 159 + "…"
    assert error_line("bug", None, "x" * 9, 8) == "bug: xxxxxxx…"
    assert error_line(None, "circuit_open", "circuit open") == "error: circuit open"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, ""), ("", ""), ("  \n ", ""), (" a \n b", "a"), ("1234567890", "1234567890"),
        ("12345678901", "123456789…"), ("12345678 0 and more", "12345678…"),
    ],
)  # fmt: skip
def test_a_text_in_brief_is_its_first_line(text, line):
    assert brief(text, 10) == line


def test_a_text_in_brief_has_at_most_160_characters():
    assert brief("x" * 160) == "x" * 160
    assert brief("x" * 161) == "x" * 159 + "…"


# -- times and numbers -------------------------------------------------------------------------------------------------

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "less than 1 s"), (0.5, "less than 1 s"), (0.6, "1 s"), (59, "59 s"), (59.5, "1 min"), (60, "1 min"),
        (200, "3 min 20 s"), (599, "9 min 59 s"), (601, "10 min"), (HOUR - 1, "59 min"), (HOUR, "1 h"),
        (HOUR + 59, "1 h"), (HOUR + 60, "1 h 1 min"), (2 * HOUR + 300, "2 h 5 min"), (10 * HOUR - 1, "9 h 59 min"),
        (10 * HOUR + 60, "10 h"), (DAY - 1, "23 h"), (DAY, "1 d"), (DAY + HOUR - 1, "1 d"),
        (3 * DAY + 5 * HOUR, "3 d 5 h"), (10 * DAY - 1, "9 d 23 h"), (10 * DAY + HOUR, "10 d"), (400 * DAY, "400 d"),
    ],
)  # fmt: skip
def test_a_length_of_time_in_two_units(seconds, text):
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "full", "near"),
    [
        (-3, "0 s", "0 s"), (0, "0 s", "0 s"), (1, "1 s", "1 s"), (59, "59 s", "59 s"), (60, "1 min", "1 min"),
        (89, "1 min", "1 min"), (90, "1 min", "2 min"), (HOUR - 31, "59 min", "59 min"), (HOUR - 30, "59 min", "1 h"),
        (HOUR, "1 h", "1 h"), (1.5 * HOUR - 1, "1 h", "1 h"), (1.5 * HOUR, "1 h", "2 h"),
        (DAY - 1801, "23 h", "23 h"), (DAY - 1800, "23 h", "1 d"), (DAY - 1, "23 h", "1 d"), (DAY, "1 d", "1 d"),
        (1.5 * DAY - 1, "1 d", "1 d"), (1.5 * DAY, "1 d", "2 d"),
    ],
)  # fmt: skip
def test_a_length_of_time_in_one_unit(seconds, full, near):
    assert (rough(seconds), rough(seconds, nearest=True)) == (full, near)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (59, "59 s"), (60, "1 min"), (90, "90 s"), (HOUR, "1 h"), (7 * DAY, "7 d"), (90_000, "25 h")],
)
def test_a_length_of_time_as_it_was_declared(seconds, text):
    assert length(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(5000, "5,000"), (0.5, "0.5"), (100.0, "100"), (1 / 3, "0.333333"), (0, "0"), (1e-9, "0")]
)
def test_a_figure_has_no_needless_digits(number, text):
    assert figure(number) == text


NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
EAST = timezone(timedelta(hours=14))


@pytest.fixture
def far_west(monkeypatch):
    """This machine's clock shows another time than UTC, and another day."""
    monkeypatch.setenv("TZ", "XYZ+13")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("far_west")
@pytest.mark.parametrize(
    ("at", "now", "text"),
    [
        (NOON, None, "2026-11-01 12:00:00 UTC"),
        (NOON, NOON.replace(hour=0), "12:00:00 UTC"),
        (NOON, NOON.replace(hour=23, minute=59), "12:00:00 UTC"),
        (NOON, NOON + timedelta(days=1), "2026-11-01 12:00:00 UTC"),
        (NOON.astimezone(EAST), NOON, "12:00:00 UTC"),
        (NOON, NOON.astimezone(EAST), "12:00:00 UTC"),
    ],
)
def test_a_moment_is_in_utc_and_without_the_date_of_today(at, now, text):
    assert moment(at, now) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5, "12:00:05 UTC (in 5 s)"),
        (0.4, "12:00:00 UTC (in less than 1 s)"),
        (0, "12:00:00 UTC (less than 1 s ago)"),
        (-DAY, "2026-10-31 12:00:00 UTC (1 d ago)"),
    ],
)
def test_a_moment_says_how_far_off_it_is(seconds, text):
    assert when(NOON + timedelta(seconds=seconds), NOON) == text


@pytest.mark.parametrize(
    ("learnt", "text"),
    [
        ({"kind": "rate", "rate": 4.8, "throttles": 3}, "4.8/s, learnt at 12:00:00 UTC (5 s ago) from 3 throttles"),
        (
            {"kind": "slots", "at_once": 2, "throttles": 1},
            "2 at once, learnt at 12:00:00 UTC (5 s ago) from 1 throttle",
        ),
        (
            {"kind": "window", "in_a_window": 1200, "throttles": 1000},
            "1,200 in a window, learnt at 12:00:00 UTC (5 s ago) from 1,000 throttles",
        ),
    ],
)
def test_a_limit_that_was_learnt_says_from_what(learnt, text):
    assert learnt_limit({**learnt, "at": NOON}, NOON + timedelta(seconds=5)) == text


class AtLeast(int):
    more = True


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((1, "job"), "1 job"), ((0, "job"), "0 jobs"), ((1204, "job"), "1,204 jobs"), ((True, "job"), "1 job"),
        ((AtLeast(10_000), "job"), "10,000+ jobs"), ((AtLeast(1), "job"), "1+ jobs"),
        ((2, "copy", "copies"), "2 copies"), ((1, "copy", "copies"), "1 copy"),
    ],
)  # fmt: skip
def test_what_is_counted_is_one_or_many(words, text):
    assert counted(*words) == text


@pytest.mark.parametrize(
    ("word", "words", "text"),
    [
        ("priorty", ["kind", "priority"], "; did you mean 'priority'?"),
        ("acb", iter(["abc"]), "; did you mean 'abc'?"),
        ("priorty", ["prior", "priority"], "; did you mean 'priority'?"),
        ("abcxy", ["abcde"], ""),
        ("other", [], ""),
    ],
)
def test_a_word_that_is_almost_one_of_them(word, words, text):
    assert nearest(word, words) == text


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ("", True), ("Bearer abc", True), ("a\tb", True), ("caf\xe9", True), ("\xff", True),
        ("\u0100", False), ("a\nb", False), ("a\r", False), ("\x00", False), ("\x7f", False),
        (" a", False), ("a\t", False),
    ],
)  # fmt: skip
def test_what_a_header_can_hold(value, fits):
    assert fits_header(value) is fits


# -- strangers' text ---------------------------------------------------------------------------------------------------


def test_no_character_that_nobody_sees_or_a_terminal_obeys_is_left():
    hidden = {n for n in range(0x110000) if unicodedata.category(chr(n)) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    for number in (hidden | IGNORABLE) - SEEN:
        char = chr(number)
        for text in (
            plain(f"a{char}b"),
            one_line(f"x{char}\u2060y"),
            in_json(json.dumps(f"a{char}", ensure_ascii=False)),
        ):
            assert char not in text, hex(number)
            text.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\U000e0041b", "a\\U000e0041b"),
        ("a\u2061b\x9b", "a\\u2061b\\x9b"),
        ("a\u200db", "a\\u200db"),
        ("\u26a0\ufe0f\ufe0f", "\u26a0\ufe0f\\ufe0f"),
        ("\ufe0f", "\\ufe0f"),
        ("\u200d", "\\u200d"),
        ("\U0001f600\u200d", "\U0001f600\\u200d"),
        ("a\u200d\u0937", "a\\u200d\u0937"),
        ("\ufe0f\u200d\u0937", "\\ufe0f\\u200d\u0937"),
        ("\u0915\u200d\U0001f308", "\u0915\\u200d\U0001f308"),
        ("a\r\nb\rc\td", "a\nb\\x0dc\td"),
    ],
)
def test_it_is_written_out(text, shown):
    assert plain(text) == shown


def test_a_text_in_one_line_has_single_blanks():
    assert one_line(" a \r\n\n\tb\x00  c\n") == "a b\\x00 c"


@pytest.mark.parametrize(
    "text", ["\u26a0\ufe0f", "\U0001f3f3\ufe0f\u200d\U0001f308", "\u0628\u0647\u200c\u0646", "\u0915\u200d\u0937"]
)
def test_what_a_reader_sees_by_its_effect_stays(text):
    assert plain(text) == one_line(text) == in_json(text) == text


def test_json_means_the_same_afterwards():
    value = "".join(map(chr, sorted(IGNORABLE))) + "\x7f\x9b\u202e\U0001f3f3\ufe0f"
    text = in_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert "\\udb40\\udc41" in in_json('"\U000e0041"')
