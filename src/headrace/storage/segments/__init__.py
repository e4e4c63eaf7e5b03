"""The layout `partitioned`: a folder of segments for each partition."""
