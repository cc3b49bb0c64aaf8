"""What `why`, `status` and `doctor` read of resources, queues and the database; deleting what is over.

May use: the rooms above it in this list: db, gates, jobs, alerts, schedules, accounts.

Begin with: `resources.py`, `why.py` (what `why` and `status` read), `retention.py`.
"""
