"""The consumer. On the way of a record: `fetcher` asks the leaders for what the `cursor` of each partition wants, and
buffers what came; the `collector` hands it out as records or Arrow batches (in `priority` order), and `consumer` is
what the caller uses. `core` holds them together, with who says what is read (`membership` in a group that its
`coordinator` looks after, or a `manual_assignment`) and how far it was read (`progress`). `listener` calls a function
for every record instead: `workload` knows which are done, `retries` what follows where one fails.
"""
