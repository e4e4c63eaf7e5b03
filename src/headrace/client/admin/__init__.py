"""What operators and bulk readers ask of a cluster, on blocking connections."""
