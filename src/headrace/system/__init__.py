"""The real clock, disk and network. Only node.py and tests build these."""
