"""Connections and metadata without blocking: one set of callbacks that threads drive by turns, or an asyncio loop.

`reactor` says what drives, `thread_reactor` and `headrace.aio.reactor` are the two that do; `broker_connection` is one
connection, `connections` the pool of them that clients share, `metadata` who leads what.
"""
