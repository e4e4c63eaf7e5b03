"""Copies of partitions on other brokers: one link per leader and follower broker, with epochs that decide the cut."""
