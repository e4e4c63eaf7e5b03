"""The layout `shared`: one commit log for all partitions of a broker, and a queue of entries into it per partition."""
