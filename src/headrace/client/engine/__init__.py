"""Sockets and routes without blocking: one set of callbacks that threads drive by turns, or an asyncio loop.

`reactor` says what drives, `threads` and `headrace.aio.reactor` are the two that do; `link` is one connection,
`network` the shared set of them, `routes` who leads what.
"""
