"""Why something does not run, in sentences; how long what is over is kept.

May use: `base`, `gates`, `jobs`, `accounts`, `events`.

Begin with: `why.py`: the sentences first, then the two answers made of them.
"""
