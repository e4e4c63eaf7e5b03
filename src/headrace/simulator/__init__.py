"""Whole clusters on simulated ports: the rooms that server/node.py runs, under load and faults drawn from a seed."""
