"""Rows of jobs: insert, claim, finish, lease, retry, cancel, order, dependencies, workflows, and filters over them.

May use: `db`, `gates`.

Begin with: `claim.py` and `finishing.py`; `ready.py`: the one way into `ready`.
"""
