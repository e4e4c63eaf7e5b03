"""Headrace: a message broker in Python that every Kafka client can use."""

__version__ = "0.1.0"
