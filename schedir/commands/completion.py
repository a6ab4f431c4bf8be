"""The command `completion`: print the code that completes `schedir` in a shell."""

from __future__ import annotations

import argparse

from schedir.extras import require_package

EXAMPLES = """\
  schedir completion bash    add to ~/.bashrc: eval "$(schedir completion bash)"
  schedir completion zsh     add to ~/.zshrc: eval "$(schedir completion zsh)"
  schedir completion fish    add to config.fish: schedir completion fish | source

The page README.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `completion`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help="the shell: bash, zsh or fish"
    )


def run(args: argparse.Namespace) -> str:
    """Return the code that completes `schedir` in a shell.

    Args:
        args: The parsed options of `completion`.

    Raises:
        UsageError: argcomplete is not installed.
    """
    require_package("argcomplete", "schedir completion")
    from argcomplete.shell_integration import shellcode

    return f"{shellcode(['schedir'], shell=args.shell)}\n"
