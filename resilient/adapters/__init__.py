"""Vendor SDKs through a job: sessions of requests and aiohttp whose every request keeps the job's gate and limits.

Most SDKs take a session: `resilient.adapters.requests.session(job)` in a plain handler, and in an ``async def`` one
`resilient.adapters.aiohttp.session(job)`. Both stand on ``job.call``, which needs no HTTP client at all. Nothing is
imported before it is asked for: the extras are yours to install.
"""
