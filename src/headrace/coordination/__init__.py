"""The coordination port on SQLite (one node) and on etcd (a cluster)."""
