"""The engine's tables: see `resilient/django/tables.py`. One file for each time the engine's own revisions went on."""
