"""The command line: `headrace serve` runs a broker, the other commands are for people who use one."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
