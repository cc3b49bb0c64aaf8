"""The only SQL.

A function is ``fn(connection, dialect, ...)``: it runs inside its caller's transaction and never commits.
"""
