"""What operators and bulk readers ask of a cluster, on the connections that all clients share."""
