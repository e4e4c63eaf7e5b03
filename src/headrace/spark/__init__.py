"""Topics in Spark: sources, sinks, sessions and pipelines. Needs `headrace[spark]` and Java 17."""
