"""The engine's revision 0009: what a job is to be when it runs once more."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from resilient.django import tables


class Migration(migrations.Migration):
    """Taken back, the tables are those of revision 0008."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("resilient", "0003_loop_lag")]
    operations: ClassVar = [migrations.RunPython(tables.forwards, tables.back_to("0008_since_0007"))]
