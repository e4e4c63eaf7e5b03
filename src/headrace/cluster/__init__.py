"""What the brokers of a cluster know together, and what they decide by it: image, controller, in-sync replicas, topics."""
