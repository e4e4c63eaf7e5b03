"""The command line: `headrace serve` runs a broker, the other commands are for people who use one."""
