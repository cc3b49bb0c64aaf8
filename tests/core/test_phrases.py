"""What people read."""

import json
import unicodedata

import pytest

from resilient.core.base.phrases import error_line, in_json, one_line, plain

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
    ],
)
def test_it_is_written_out(text, shown):
    assert plain(text) == shown


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
