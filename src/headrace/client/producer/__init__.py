"""The producer: records into batches, batches into lanes, lanes to their leaders, each record told where it is.

A lane (`lane`) is one partition under one acks: which batch may leave, under which sequence number, and what an answer
means. `outcomes` says what a code or a lost link tells of a batch, `faults` and `spread` where records without a key
go, `bound` how much may wait. None of these does I/O. `sender` joins them to the engine, `producer` is the public face.
"""
