"""What the brokers of a cluster know together: coordination, the metadata image, membership, topics, placement."""
