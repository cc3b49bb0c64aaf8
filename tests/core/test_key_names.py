"""What the engine's own resource keys stand for, as lists and pages say it."""

import pytest

from resilient.core.inspect.names import meaning


@pytest.mark.parametrize(
    ("key", "stands_for"),
    [
        ("notes", ""),
        ("notes/token", ""),
        ("notes/acct-7/search", ""),
        ("notes:token", "the token endpoint of notes: its tokens are fetched and refreshed there"),
        ("notes:token@acme.example:443", "the token endpoint of notes: its tokens are fetched and refreshed there"),
        ("crm/a/budget:search", "what counts for the budget 'search' that crm names in its answers"),
        ("outbox", ""),
        ("outbox/shop", "the destination of events 'shop'"),
    ],
)
def test_a_key_that_no_program_chose_is_explained(key, stands_for):
    assert meaning(key) == stands_for
