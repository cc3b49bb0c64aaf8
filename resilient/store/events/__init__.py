"""What consumers took already, and questions about the outbox.

May use: `db`, `jobs`, `inspect`.

Begin with: `outbox.py`; an event itself is a job.
"""
