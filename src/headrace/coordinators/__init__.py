"""What every coordinator has: the state that it keeps in a replicated internal topic, and how it is read back."""
