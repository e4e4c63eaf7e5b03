"""Consuming: record sets fetched ahead over all leaders, handed out as records or Arrow batches, progress kept."""
