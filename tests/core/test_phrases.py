"""What people read."""

import pytest

from resilient.core.base.phrases import error_line


@pytest.mark.parametrize(
    ("kind", "code", "message", "line"),
    [
        ("permanent", "http_422", "POST /x answered 422: no", "permanent http_422: POST /x answered 422: no"),
        ("bug", "ValueError", "ValueError: odd", "bug ValueError: odd"),
        ("transient", "circuit_open", "circuit open", "transient: circuit open"),
        ("timeout", None, "took longer", "timeout: took longer"),
        ("bug", "KeyError", "", "bug KeyError"),
        (None, None, "a remark\nand more", "a remark"),
    ],
)
def test_an_error_in_one_line_says_each_word_once(kind, code, message, line):
    assert error_line(kind, code, message) == line
