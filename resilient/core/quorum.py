"""Whether enough of a key's children are ill to call the key itself ill.

A child is what comes next on the path of a request: below a root an account, below an account an endpoint. Children
below a root belong to different owners, so one of them, or a handful among many that work, never stops the others;
its own circuit does that work. Endpoints belong to one account, so stopping that harms nobody else. ``children`` is
`BreakerPolicy.children`; ill are those whose latest request failed, well those whose latest one did not:

    ill                                 well            below a root            below an account
    one                                 none            no                      yes
    one                                 any             no                      no
    two, of children=3                  none            no                      yes
    two, of children=3                  any             no                      no
    at least ``children``               no more         yes                     yes
    at least ``children``               more            no                      yes
    the key's own requests              none            yes                     yes

A root with one account or with two therefore never opens by itself: the accounts' own circuits do. The last line is
work on the root's very key, which has no other circuit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

OWN: Final = "."  # the child name of a key's own requests


def ill_enough(ill: Collection[str], well: Collection[str], children: int, *, root: bool) -> bool:
    """Whether failures of these children count against their parent; see the table above."""
    if not root:
        return len(ill) >= min(children, len(ill) + len(well)) > 0
    if OWN in ill and not well:
        return True
    return len(ill) >= max(children, len(well))
