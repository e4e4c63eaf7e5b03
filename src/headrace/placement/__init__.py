"""Where replicas go: spreading, the ring, moves, drains and plans of reassignment. Pure."""
