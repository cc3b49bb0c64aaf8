"""Every example runs, offline, as a user would run it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nursery
from tests.helpers import LIMIT

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "fastapi_app.py": "201, 422; mails sent to ada@example.com; the job succeeded",
    "flask_app.py": "order 2: succeeded, invoice R-00002",
    "litestar_app.py": ("201, 422; ada: {'exists': True, 'welcomed': True}; bob: {'exists': False, 'welcomed': False}"),
    "mailboxes.py": "bob has consented again: ada sent 3, bob sent 3; bob is active",
    "order_pipeline.py": (
        "o-1: succeeded",
        "o-2: undone (order.charge succeeded, order.reserve succeeded, order.ship dead, order.notify cancelled)",
        "stripe: POST /v1/charges, POST /v1/charges, POST /v1/refunds",
        "DELETE /reservations/o-2",
        "mail: POST /mails\n",
    ),
    "outbox_events.py": ("3 events accepted, 1 came again", "ada 1: order.placed chair\nada 2: order.placed rug"),
    "push_contacts.py": "59 pushed, 1 refused by the API; it said 'slow down' ",
    "starlette_app.py": (
        "201, 422; ada: {'exists': True, 'welcomed': True}; bob: {'exists': False, 'welcomed': False}"
    ),
    "sync_contacts.py": "250 contacts; number 7 is there: False",
    "slack_sdk_async.py": "6 messages, none twice; refreshes: 1; 'slow down': 1, ignored: 0; over the limit: 0",
    "stripe_sdk.py": "5 payments, none twice; answers lost: 1; 'slow down': 1, ignored: 0",
}


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAYS))
def test_example(name, tmp_path):
    with (tmp_path / "errors").open("w+") as errors:
        ran = nursery.start(EXAMPLES / name, stdout=subprocess.PIPE, stderr=errors)
        out, _ = ran.communicate(LIMIT)
        errors.seek(0)
        assert ran.returncode == 0, errors.read()
    for line in (SAYS[name],) if isinstance(SAYS[name], str) else SAYS[name]:
        assert line in out


@pytest.mark.slow
def test_the_outbox_with_a_broker():
    address = "amqp://guest:guest@127.0.0.1:5672/"
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 5672)):
            pytest.skip("no RabbitMQ at 127.0.0.1:5672")
    command = [sys.executable, EXAMPLES / "outbox_events.py", address]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "3 events confirmed by RabbitMQ" in ran.stdout
