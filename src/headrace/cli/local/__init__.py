"""A cluster on this machine: etcd and brokers as processes below one folder, to try out, to kill, to test."""
