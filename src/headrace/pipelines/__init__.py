"""Each pipeline is one small PySpark program: options in, a summary out. `headrace pipeline` runs them."""
