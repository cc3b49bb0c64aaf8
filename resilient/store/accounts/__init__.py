"""Connections, grants and secrets; deaths of grants.

May use: `db`, `gates`, `schedules`, `alerts`.

Begin with: `grants.py`; `secrets.py`: how columns are sealed.
"""
