"""The registry: a server of routes that keeps nothing of its own and folds everything it tells from etcd."""
