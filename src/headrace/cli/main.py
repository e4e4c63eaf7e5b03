"""The command `headrace`: a list of subcommands, each imported only when it is called.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 130 interrupted. Errors are one line on stderr.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from headrace import __version__
from headrace.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from headrace.cli.lazy_group import LazyGroup
from headrace.cli.standard_output import OutputFailed, told_output
from headrace.errors import HeadraceError, SettingError

# Name and one line for the help: what --help shows without importing anything.
COMMANDS = {
    "serve": "Run a broker.",
    "registry": "Run a registry: routes for clients, not schemas.",
    "doctor": "Look for what keeps a broker from running well.",
    "topic": "Create, list, describe, alter and delete topics.",
    "produce": "Send lines of standard input, or of a file, to a topic.",
    "consume": "Print the records of a topic.",
    "export": "Copy a topic to a file: JSON lines or Parquet.",
    "import": "Copy a file to a topic.",
    "group": "List, describe, reset and delete consumer groups.",
    "queue": "Show and reset share groups; redrive dead letters; recall.",
    "transaction": "List, describe and end transactions; find those that hang.",
    "context": "Name clusters, and choose which one commands talk to.",
    "config": "Show and change settings of topics, brokers and the cluster.",
    "cluster": "Describe a cluster; run one on this machine.",
    "broker": "List, describe and drain brokers.",
    "partition": "List and move partitions, elect leaders.",
    "top": "Watch brokers, topics and groups live: traffic and lag.",
    "load": "Generate traffic, with a ledger of what was acknowledged.",
    "query": "Find records by key, offset or time, in brokers or an archive.",
    "sql": "Query topics with SQL.",
    "pipeline": "Archive, audit, compact, index, report, your own jobs: Spark.",
    "completion": "Complete commands and names in bash, zsh and fish.",
    "log": "Read a data folder offline: what is in it, and is it whole.",
}


@click.group(
    cls=LazyGroup,
    package="headrace.cli",
    summaries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="headrace", message="%(prog)s %(version)s")
def root() -> None:
    """A message broker that every Kafka client can use.

    \b
    headrace serve --data ./data              start a broker on 127.0.0.1:9092
    echo hello | headrace produce greetings   send a record
    headrace consume greetings                read it back

    Other commands find the broker by --bootstrap, HEADRACE_BOOTSTRAP, `headrace
    context`, or at 127.0.0.1:9092. Every listing command takes --json.
    """


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of the console script; answers the exit code."""
    try:
        with told_output():
            return root.main(arguments, prog_name="headrace", standalone_mode=False) or 0
    except OutputFailed as error:
        return 0 if error.is_reader_gone else _fail(error, EXIT_FAILED)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help(), err=True) if error.ctx else None
        return EXIT_USAGE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except SettingError as error:
        return _fail(error, EXIT_USAGE)
    except HeadraceError as error:
        return _fail(error, EXIT_FAILED)


def _fail(error: HeadraceError, code: int) -> int:
    click.echo(f"headrace: {error}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
