"""Settings: the tables of what can be set, and their values, read from file, environment and flags."""
