"""The coordination port on SQLite (one node) and on etcd (a cluster), and the store of revisions beneath the first."""
