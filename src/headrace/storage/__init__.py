"""Storage: logs of record batches on disk. `log.py` is the interface that everything above relies on."""
