"""Pages of a made-up server, for the tests of paginators."""

from resilient.core.base.budgets import Fields
from resilient.core.base.exchange import AnswerFacts
from resilient.core.sync.paging import PageRequest

URL = "https://api.example.com/things"
FIRST = PageRequest(URL)


def answer(body=None, status=200, **headers):
    """An answer; ``x_next`` is the header ``x-next``."""
    return AnswerFacts(status, Fields.of({name.replace("_", "-"): value for name, value in headers.items()}), body=body)
