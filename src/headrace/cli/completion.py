"""`headrace completion`: what a shell reads to complete commands, flags and names."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
VARIABLE = "_HEADRACE_COMPLETE"
"""How the script asks this program; click names it after the program."""

# Behind `retention.ms=` a value follows, and no space, which fish knows by itself: (as click writes it, as it is here)
_NO_SPACE = {
    "bash": ("COMPREPLY+=($value)", "COMPREPLY+=($value)\n            [[ $value == *= ]] && compopt -o nospace"),
    "zsh": (
        "compadd -U -V unsorted -a completions",
        "local -a behind; [[ $completions[1] == *= ]] && behind=(-S '')\n"
        '        compadd "${behind[@]}" -U -V unsorted -a completions',
    ),
}


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(shell: str) -> None:
    """Print what lets a shell complete commands, flags, topics, groups and settings.

    \b
    eval "$(headrace completion bash)"                  in ~/.bashrc
    eval "$(headrace completion zsh)"                   in ~/.zshrc, behind compinit
    headrace completion fish > ~/.config/fish/completions/headrace.fish

    Topics and groups are asked of the broker that the line, the environment or
    the context names, for half a second.
    """
    from headrace.cli.main import root

    source = SHELLS[shell](root, {}, "headrace", VARIABLE).source()
    click.echo(source.replace(*_NO_SPACE[shell]) if shell in _NO_SPACE else source)
