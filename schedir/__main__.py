"""The `schedir` command line.

Exit codes: 0 fine; 2 a refused program, bad usage, or an optional package that is missing or
broken; 1 a bug of schedir, or a rank that crashed or was killed; 130 interrupted.
A command writes its output at its end, in one piece.  Errors go to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from schedir import __version__
from schedir.commands import COMMANDS, module_of
from schedir.commands.common.trust_options import add_trust
from schedir.errors import ProgramError, UsageError
from schedir.extras import broken_package
from schedir.ir.input_trust import MOST, input_limits
from schedir.retired_names import RETIRED

_ABOUT = "Pipeline schedules as programs: compile, check, predict, draw and run them."
_EXIT = (
    "exit code: 0 fine, 2 refused program or bad usage, 1 a bug of schedir or a rank that crashed, "
    "130 interrupted"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    # Python sets a closed stream to None.  The next file that is opened would get the descriptor of
    # the stream, and with it what is printed.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = _parser(argv).parse_args(argv, argparse.Namespace(typed=argv))
        code_too = not args.no_code and None
        most = MOST if args.most_instructions is None else args.most_instructions
        with input_limits(instructions=most, code=code_too), _plain_warnings():
            said: str | int | tuple[str, int] = args.run(args)
        text, code = said if isinstance(said, tuple) else (said, 0)
        return (_say(text) or code) if isinstance(text, str) else text
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except ProgramError as error:
        from schedir.io.terminal import format_error

        print(format_error(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from traceback import print_exc

        from schedir.io.terminal import format_error

        if (broken := broken_package(error)) is not None:
            print(format_error(broken), file=sys.stderr)
            return 2
        print("this is a bug in schedir", file=sys.stderr)
        print_exc()
        return 1


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print the warnings of schedir as a sentence, without the source line that raised them."""
    usual, own = warnings.formatwarning, str(Path(__file__).parent)

    def plain(message: Any, category: Any, filename: str, *more: Any, **named: Any) -> str:
        if category is UserWarning and filename.startswith(own):
            return f"warning: {message}\n"
        return usual(message, category, filename, *more, **named)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _say(text: str) -> int:
    """Write to standard output.  A reader that stops early (`| head`) is no error."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except OSError as error:
        raise UsageError(f"cannot write to standard output: {error.strerror}") from None
    return 0


# ---------------------------------------------------------------- arguments


class _Parser(argparse.ArgumentParser):
    more: Callable[[], str] | None = None  # returns help that takes long to make

    def format_help(self) -> str:
        return super().format_help() + (self.more() if self.more else "")

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        retired = [RETIRED[name] for word in words if (name := word.partition("=")[0]) in RETIRED]
        raise UsageError(message, hint=(*retired, f"see {self.prog} --help")[0])


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="schedir", description=_ABOUT, epilog=_EXIT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"schedir {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = argv[0] if argv else ""
    for name, about in COMMANDS.items():
        sub = subparsers.add_parser(name, help=about, description=about, allow_abbrev=False)
        if name == asked:  # to import all commands would take longer than most commands run
            command = module_of(name)
            sub.set_defaults(run=command.run)
            command.arguments(sub)
            add_trust(sub)
            sub.more = getattr(command, "more", None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
