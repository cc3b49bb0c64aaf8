"""``resilient demo``: the whole engine at work on this machine, and an audit of what it did.

A local HTTP provider in a process of its own misbehaves in every way that providers do; two worker
processes push a thousand contacts to it, one of them is killed on the way. At the end the provider's own
log is held against the database: what was promised and is not true makes the exit status 1.
"""
