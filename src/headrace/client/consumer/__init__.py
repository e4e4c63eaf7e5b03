"""The consumer. On the way of a record: `fetcher` asks the leaders for what the `cursor` of each partition wants, the
`fetch_buffer` keeps what came, the `collector` hands it out as records or Arrow batches (in `priority` order), and
`consumer` is what the caller uses. `core` holds them together, with who says what is read (`membership` in a group that
its `coordinator` looks after, or a `manual_assignment`) and how far it was read (`progress`). `listener` calls a
function for every record instead: `workload` knows which are done, `failure_policy` and `redelivery` what follows where
one fails.
"""
