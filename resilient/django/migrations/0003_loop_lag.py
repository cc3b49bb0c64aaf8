"""The engine's revision 0008: how long a worker's event loop stands still."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from resilient.django import tables


class Migration(migrations.Migration):
    """Taken back, the tables are those of revision 0007."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("resilient", "0002_worker_resources")]
    operations: ClassVar = [migrations.RunPython(tables.forwards, tables.back_to("0007_since_0006"))]
