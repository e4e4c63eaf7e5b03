"""The record batch: its header, its codecs and the kernel that unpacks and builds it."""
