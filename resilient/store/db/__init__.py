"""Databases: engines, the two dialects, schema and migrations, the short way to the drivers, waking.

May use: Nothing else of the store.

Begin with: `tables.py`: every table; `database.py`: transactions; `dialect.py`: every difference.
"""
