"""The dashboard: pages that say which accounts stand still, why, and what to press.

Begin with `mount.py` (what there is), `guard.py` (who may see and do what); a page is a function of a `Visit`
(`visit.py`) in a module named for its matter, and a template. It uses the public API of an app and the read-only
queries of `store/inspect/pages.py`.
"""
