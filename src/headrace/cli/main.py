"""The command `headrace`: a list of subcommands, each imported only when it is called.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 130 interrupted. Errors are one line on stderr.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from headrace import __version__
from headrace.errors import HeadraceError, SettingError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Name, module, one line for the help: what --help shows without importing anything.
COMMANDS = {
    "serve": ("headrace.cli.serve", "Run a broker."),
    "registry": ("headrace.cli.registry", "Run a registry: routes for clients, and nothing kept."),
    "topic": ("headrace.cli.topic", "Create, list, describe, alter and delete topics."),
    "produce": ("headrace.cli.produce", "Send lines of standard input, or of a file, to a topic."),
    "consume": ("headrace.cli.consume", "Print the records of a topic."),
    "group": ("headrace.cli.group", "List, describe, reset and delete consumer groups."),
    "config": ("headrace.cli.config", "Show and change settings of topics, brokers and the cluster."),
    "cluster": ("headrace.cli.cluster", "Describe a cluster; run one on this machine."),
    "broker": ("headrace.cli.broker", "List, describe and drain brokers."),
    "partition": ("headrace.cli.partition", "List and move partitions, elect leaders."),
    "load": ("headrace.cli.load", "Generate traffic, with a ledger of what was acknowledged."),
    "query": ("headrace.cli.query", "Find records by key, in an archive."),
    "sql": ("headrace.cli.sql", "Query topics with SQL."),
    "pipeline": ("headrace.cli.pipeline", "Archive, audit, compact, index, report, and jobs of your own, on Spark."),
    "log": ("headrace.cli.log", "Read a data folder offline: what is in it, and is it whole."),
}


class LazyGroup(click.Group):
    """Knows its commands by name and summary; a module `headrace.cli.x` has its command as `x`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader has seen enough. Nothing more may be written, not even by the interpreter's exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headrace", message="%(prog)s %(version)s")
def root() -> None:
    """A message broker that every Kafka client can use.

    \b
    headrace serve --data ./data              start a broker on 127.0.0.1:9092
    echo hello | headrace produce greetings   send a record
    headrace consume greetings                read it back

    The broker that other commands talk to is --bootstrap, or the environment's
    HEADRACE_BOOTSTRAP, or 127.0.0.1:9092. Every listing command takes --json.
    """


def main(arguments: list[str] | None = None) -> Any:
    """Entry point of the console script; answers the exit code."""
    try:
        return root.main(arguments, prog_name="headrace", standalone_mode=False) or 0
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
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
