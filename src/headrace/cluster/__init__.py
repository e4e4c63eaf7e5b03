"""What the brokers of a cluster know together and decide by it: image, controller, in-sync replicas, membership."""
