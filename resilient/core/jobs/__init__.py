"""The life of a job: its states, what becomes of it after an execution, retries, marks of requests, workflows.

May use: `base`, `gates`.

Begin with: `decide.py`: (job, outcome, policy, now) to a transition; `states.py`.
"""
