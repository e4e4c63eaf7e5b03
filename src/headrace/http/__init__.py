"""The HTTP port: produce and fetch for programs without a Kafka client, health, metrics and a status page."""
