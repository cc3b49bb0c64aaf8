"""Recurring jobs: declared, ticked, per account.

May use: `ground`, `jobs`.

Begin with: `declaration.py`; `schedules.py`; `per_account.py`: schedules ``for_each`` account.
"""
