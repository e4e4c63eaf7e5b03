"""Queues: per-message delivery over the same topics. Who has acquired which records of a partition, for how long and
how often, and how that is kept."""
