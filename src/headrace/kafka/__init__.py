"""The Kafka front end: connections, and one file per API."""
