"""Stands before the real one for commands under test: kio imports it where it is installed, which no user waits for."""

raise ImportError("not in a user's environment")
