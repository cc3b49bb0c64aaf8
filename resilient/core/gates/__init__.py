"""What stops or slows a resource: breaker, cooldown, limits, admission, and what an answer is evidence of.

May use: `base`.

Begin with: `admission.py`: how many jobs may start; `breaker.py`: the state machine.
"""
