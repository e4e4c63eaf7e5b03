"""A broker for the tests of a program that talks to one: `TemporaryBroker`, and fixtures of pytest made of it."""

from headrace.testing.temporary_broker import TemporaryBroker

__all__ = ["TemporaryBroker"]
