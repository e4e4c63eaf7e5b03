"""The real clock, disk and network. Only server/node.py and tests build these."""
