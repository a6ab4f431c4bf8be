"""The command `completion`: print the code that completes `schedir` in a shell."""

from __future__ import annotations

import argparse

from schedir.extras import require_package

EXAMPLES = """\
  eval "$(schedir completion bash)"          a line for ~/.bashrc
  eval "$(schedir completion zsh)"           a line for ~/.zshrc
  schedir completion fish | source           a line for ~/.config/fish/config.fish

The page README.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `completion`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(args: argparse.Namespace) -> str:
    """Return the code for the shell.

    Args:
        args: The parsed options of `completion`.

    Raises:
        UsageError: argcomplete is not installed.
    """
    require_package("argcomplete", "schedir completion")
    import argcomplete

    return f"{argcomplete.shellcode(['schedir'], shell=args.shell)}\n"
