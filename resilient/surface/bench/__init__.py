"""Measurements a user can repeat: ``resilient bench floor|drain|enqueue|pickup|http``.

Each bench works in a scratch place of its own and prints one JSON object. `floor` is the bare limit of the
same database with the least code that could do the work, so that a figure can be given as a share of it in
the same run. Timings exclude starting processes and filling the queue.
"""
