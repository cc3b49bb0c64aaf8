"""For Django projects (extra ``django``): jobs in Django's own transactions, its settings, commands and migrations.

``INSTALLED_APPS = [..., "resilient.django"]``, then ``manage.py migrate`` makes the tables. In `transaction.atomic()`::

    resilient.django.enqueue(push, Contact(...), resource_key="crm/acct-7")

writes the job on Django's connection: it exists if, and only if, the block commits. `session` is that connection for
any other call that takes ``session=``. ``manage.py resilient worker`` runs the jobs.
"""

from __future__ import annotations

from resilient.core.base.errors import MissingExtra

try:
    import django  # noqa: F401 - whether it is there
except ModuleNotFoundError as error:
    raise MissingExtra("Django projects need it: pip install 'resilient-engine[django]'") from error

from resilient.django.connection import session
from resilient.django.program import aenqueue, app, close, enqueue, publish, run_jobs
from resilient.django.settings import address

__all__ = ["address", "aenqueue", "app", "close", "enqueue", "publish", "run_jobs", "session"]
