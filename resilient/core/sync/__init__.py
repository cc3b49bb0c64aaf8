"""Streams and pages as facts and as a state machine: paginators, incremental cursors, full passes.

May use: `base`.

Begin with: `stream.py`: the state machine; `paginators.py`: how APIs page.
"""
