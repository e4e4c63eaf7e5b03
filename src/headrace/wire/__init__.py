"""The Kafka wire format: bytes to messages and back, without any I/O."""
