"""The producer: records into batches, batches to the leaders of their partitions.

producer            the public face for threads; `headrace.aio` has the one for asyncio
                    (`records.router` and `records.builder`, compiled, put a record into its partition's open batch)
accumulator         records into the open batch of their partition; batches from their first record to their fate
sticky_partitioner  where records without a key go, and which brokers they avoid
lane                one partition under one acks: which batch may leave, under which sequence, what an answer means; no
                    I/O
sender              what is ready into requests to leaders, answers to lanes, fates to deliveries
request             produce requests and their answers
direct              a record that is waited for alone, written and its answer read by its own sender
transaction         the public transaction, for threads; `headrace.aio` has the one for asyncio
transaction_core    where a producer's transaction stands, and what its coordinator is asked
transaction_requests  the requests of a transaction; what it takes to end a prepared one from anywhere
options             what a producer can be told
"""
