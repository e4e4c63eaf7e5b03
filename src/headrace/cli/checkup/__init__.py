"""What `headrace doctor` looks at. Everything here only reads: a broker may run beside it."""
