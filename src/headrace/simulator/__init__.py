"""Whole clusters on simulated ports: the rooms that node.py runs, under load and faults drawn from a seed."""
