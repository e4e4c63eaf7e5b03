"""The subcommands of `headrace pipeline`, one file each, imported when called."""
