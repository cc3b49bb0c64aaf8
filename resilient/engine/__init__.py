"""The shell around the decisions: gather facts, decide, write."""
