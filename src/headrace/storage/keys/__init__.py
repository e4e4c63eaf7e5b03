"""The key index: from a key to the offsets of its records, for any layout of logs."""
