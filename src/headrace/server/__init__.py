"""Composition roots: a broker and a registry, built from the real ports, each as a process of its own."""
