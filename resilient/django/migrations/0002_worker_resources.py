"""The engine's revision 0007: which resources a worker serves."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from resilient.django import tables


class Migration(migrations.Migration):
    """Taken back, the tables are those of revision 0006."""

    dependencies: ClassVar[list[tuple[str, str]]] = [("resilient", "0001_tables")]
    operations: ClassVar = [migrations.RunPython(tables.forwards, tables.back_to("0006"))]
