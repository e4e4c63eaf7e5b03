"""Fakes for the four ports: a virtual clock, a fault-injecting disk, a network in memory."""
