"""The `schedir` command line.

Exit codes:

- 0: success.
- 1: a bug of schedir, or a rank that crashed or was killed.
- 2: a refused program, no result within the limits, wrong usage, or a missing or broken package.
- 130: interrupted.

A command prints its result when it ends.  Errors go to standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NoReturn

from schedir import __version__
from schedir.commands import COMMANDS, import_command
from schedir.commands.common.progress_bar import show_activity
from schedir.errors import ConfigError, SchedirError, UsageError
from schedir.extras import broken_package
from schedir.ir.cost.number_parsing import parse_integer
from schedir.ir.input_trust import DEFAULT_MAX_INSTRUCTIONS, input_limits
from schedir.retired_names import RETIRED_HINTS, find_present_name

_DESCRIPTION = "Pipeline schedules as programs: compile, check, predict, draw and run them."
_START_HELP = f"""\
{_DESCRIPTION}

  schedir schedules                     list the built-in schedules
  schedir check zb_v                    prove that a schedule is complete and finishes
  schedir draw interleaved zb_v         draw schedules on the terminal
  schedir recommend --costs F=1,B=2     rank all schedules for a model
  schedir explain one_f_one_b           explain why ranks are idle
  schedir examples                      write example files to the folder examples
  schedir train examples/demo.toml      train a model on this machine

schedir --help lists all commands, and schedir COMMAND --help its options.
"""
_EXIT_CODES_HELP = (
    "exit code: 0 success, 1 a bug of schedir or a crashed rank, 2 a refused program or wrong "
    "usage, 130 interrupted"
)

# Commands without an activity indicator.  `train`, like `plan --measure`, prints its own progress.
# `studio` runs until the user ends it.
_WITHOUT_ACTIVITY: Final = {"studio", "train"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: The arguments after the program name.  The default is `sys.argv[1:]`.

    Returns:
        The exit code, as listed in this module's docstring.
    """
    # Python sets a closed stream to None.  Without a replacement, the next file that the process
    # opens would get the descriptor of the stream, and the output would go into this file.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    parser: _Parser | None = None
    try:
        argv = sys.argv[1:] if argv is None else argv
        if "_ARGCOMPLETE" in os.environ:  # a shell asks for the completions of a line
            from schedir.commands.common.name_completion import answer_completion_request

            answer_completion_request(_build_parser)
        if not argv:
            return _print_output(_START_HELP)
        parser = _build_parser(argv)
        args = parser.parse_args(argv, argparse.Namespace(command_words=argv))
        code_too = not args.no_code and None
        max_instructions = (
            DEFAULT_MAX_INSTRUCTIONS if args.max_instructions is None else args.max_instructions
        )
        shows_activity = argv[0] not in _WITHOUT_ACTIVITY and not getattr(args, "measure", False)
        activity = show_activity(f"schedir {argv[0]}") if shows_activity else nullcontext()
        with (
            input_limits(max_instructions=max_instructions, allow_code=code_too),
            _use_plain_warnings(),
            activity,
            _locate_config_errors(args),
        ):
            result: str | int | tuple[str, int] = args.run(args)
        text, code = result if isinstance(result, tuple) else (result, 0)
        return (_print_output(text) or code) if isinstance(text, str) else text
    except SystemExit as end:  # argparse exits after --help and --version
        return int(end.code or 0)
    except SchedirError as error:
        from schedir.io.terminal_output import format_error

        # `train` has settings instead of options. They have the names of the arguments in Python.
        is_command = not argv or argv[0] != "train"
        if is_command and parser is not None and parser.command_parser is not None:
            parser.command_parser.use_option_name(error)
        print(format_error(error, is_command=is_command), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from traceback import print_exc

        from schedir.io.terminal_output import format_error

        if (broken := broken_package(error)) is not None:
            print(format_error(broken), file=sys.stderr)
            return 2
        print("this is a bug of schedir", file=sys.stderr)
        print_exc()
        return 1


def _locate_config_errors(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Return a context that adds the position in `--config FILE.toml` to errors."""
    if getattr(args, "config", None) is None:
        return nullcontext()
    from schedir.commands.common.program_options import locate_config_errors

    return locate_config_errors(args)


@contextmanager
def _use_plain_warnings() -> Iterator[None]:
    """Print schedir's warnings as `warning: TEXT`, without the source line that raised them."""
    original_format, package_folder = warnings.formatwarning, str(Path(__file__).parent)

    def plain(
        message: Any, category: Any, filename: str, *other_arguments: Any, **named: Any
    ) -> str:
        if category is UserWarning and filename.startswith(package_folder):
            return f"warning: {message}\n"
        return original_format(message, category, filename, *other_arguments, **named)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = original_format


def _print_output(text: str) -> int:
    """Write to standard output.  A reader that stops early (`| head`) is not an error."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit
    except OSError as error:
        raise UsageError(f"cannot write to standard output: {error.strerror}") from None
    return 0


# ---------------------------------------------------------------- arguments


class _StoreOnce(argparse._StoreAction):
    """Store the value of an option, and refuse the option if it is given twice."""

    is_given = False

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if self.is_given and option_string:
            raise UsageError(f"{option_string} is given twice")
        self.is_given = True
        super().__call__(parser, namespace, values, option_string)


class _Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register("action", None, _StoreOnce)
        self.register("action", "store", _StoreOnce)

    extra_help: Callable[[], str] | None = None  # returns help text that is slow to create
    examples = ""  # lines of help after the options

    def format_help(self) -> str:
        examples = f"\nexamples:\n{self.examples}" if self.examples else ""
        return super().format_help() + examples + (self.extra_help() if self.extra_help else "")

    command_parser: _Parser | None = None  # the parser of the command that the user typed

    def error(self, message: str) -> NoReturn:
        parser = self.command_parser or self
        hint = f"see {parser.prog} --help"
        reason, _, details = message.partition(": ")
        if reason == "the following arguments are required":
            names = [*map(parser._add_value_name, details.split(", "))]
            message = f"{parser.prog} needs {', '.join(names)}"
            option = parser._option_string_actions.get(details.split(", ")[0])
            hint = f"{names[0]}: {option.help}" if option else hint
        if reason == "unrecognized arguments":
            word = details.split()[0].partition("=")[0]
            message = f"{parser.prog} has no option {word}"
            hint = parser.suggest_option(word) or hint
            if not word.startswith("-"):
                from schedir.io.source_loader import suggest_separator, suggest_source

                word = details.split()[0]
                message = f"{parser.prog} does not take {word!r}"
                hint = suggest_separator(word) or (
                    f"if {word!r} belongs to a list, write the list with commas and without spaces"
                )
                if "--set" in parser._option_string_actions and "=" in word:
                    hint = f"--set {word}"
                if "--initial-schedules" in parser._option_string_actions and "=" not in word:
                    hint = f"--initial-schedules {word} also searches from this schedule"
                if any(
                    action.dest == "source" and action.nargs is None for action in parser._actions
                ):
                    message = f"{parser.prog} takes one SCHEDULE, and {word!r} is one too many"
                    hint = suggest_source(word)
                    hint = hint or f"schedir compare SCHEDULE {word} compares several schedules"
                if re.fullmatch(r"[kMGTP]?i?B", word):  # as in --memory-limit 40 GB
                    hint = f"write a number of bytes without a space: 40{word}"
        raise UsageError(message, hint=hint)

    def _add_value_name(self, option: str) -> str:
        """Return the name of an argument, with the name of its value if it is an option."""
        action = self._option_string_actions.get(option)
        return f"{option} {action.metavar}" if action and action.metavar else option

    def use_option_name(self, error: SchedirError) -> None:
        """Replace the names of arguments by options in an error that begins with such a name.

        `memory_limit` becomes `--memory-limit`.
        """
        # If the value is in a file, the error keeps the name of the setting.
        if isinstance(error, ConfigError) or hasattr(error, "__notes__"):
            return
        # Users recognise an option of one word also without its dashes.
        options = {name: f"--{name.replace('_', '-')}" for name in error.fields if "_" in name}
        if not any(error.fact.startswith(f"{name} ") for name in options):
            return
        for name, option in options.items():
            if option in self._option_string_actions:
                error.fact = re.sub(rf"(?<!\S){name}(?!\S)", option, error.fact)

    def suggest_option(self, name: str) -> str:
        """Return a hint for an option that does not exist, or an empty string."""
        if not name.startswith("--"):
            return self.suggest_option(f"-{name}") if re.match(r"-\w\w", name) else ""
        option_actions = self._option_string_actions
        if (action := option_actions.get("-O")) is not None:
            from schedir.commands.common.program_options import PROGRAM_OPTIONS
            from schedir.io.option_spelling import FIELDS_WITH_FLAGS

            field = name[2:].replace("-", "_")
            field = find_present_name(field, PROGRAM_OPTIONS) or field
            if field in PROGRAM_OPTIONS and field not in FIELDS_WITH_FLAGS:
                value = f"={kind.metavar}" if (kind := PROGRAM_OPTIONS[field].kind).metavar else ""
                try:
                    action.const(field, f"{field}{value}")
                except UsageError as error:
                    return str(error.fact)
                return f"did you mean -O {field}{value}?"
        hint = RETIRED_HINTS.get(name, "")
        present_words = hint.partition(" is now ")[2].split()  # Empty if nothing has replaced it.
        if hint and (not present_words or any(word in option_actions for word in present_words)):
            return hint
        if name == "--costs-from" and "--costs" in option_actions:  # an option of `search`
            return '--costs "$(schedir calibrate RUN.timeline)" has the mean times of a run'
        if "--set" in option_actions:
            from schedir.training.config.settings_table import list_settings

            given_section, _, field = name[2:].replace("-", "_").rpartition(".")
            sections = sorted(list_settings().items(), key=lambda item: item[0] != given_section)
            for title, (_, settings) in sections:
                if field in [setting.name for setting in settings]:
                    section = title.split()[0]  # "model" for "model of kind llama"
                    return f"--set {section}.{field}=VALUE, or {field} in [{section}] of the file"
        options = {
            option[2:].replace("-", "_"): option for option in option_actions if len(option) > 2
        }
        matches = [
            options.get(find_present_name(name[2:].replace("-", "_"), options), ""),
            *sorted((option for option in option_actions if option.startswith(name)), key=len),
            *get_close_matches(name, option_actions, 1, cutoff=0.75),
        ]
        return next((f"did you mean {option}?" for option in matches if option), "")


def _add_input_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit the size of programs and that forbid running Python files."""
    group = parser.add_argument_group("limits for untrusted files")
    group.add_argument(
        "--max-instructions", type=_parse_positive_count, metavar="N",
        help=f"refuse programs with more than N instructions ({DEFAULT_MAX_INSTRUCTIONS}); an "
             "instruction takes about 30 to 100 bytes of memory",
    )  # fmt: skip
    group.add_argument(
        "--no-code", action="store_true",
        help="do not execute Python files: refuse a schedule file.py:function on the command line "
        "and in a configuration",
    )  # fmt: skip


def _parse_positive_count(text: str) -> int:
    try:
        number = parse_integer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text!r}")
    return number


def _build_parser(argv: Sequence[str]) -> _Parser:
    parser = _Parser(
        prog="schedir", description=_DESCRIPTION, epilog=_EXIT_CODES_HELP, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"schedir {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = argv[0] if argv else ""
    if not asked.startswith("-") and asked not in ("", *COMMANDS):
        matches = get_close_matches(asked, COMMANDS, 1)
        hint = (
            f"did you mean schedir {matches[0]}?"
            if matches
            else "schedir --help lists all commands"
        )
        raise UsageError(
            f"schedir has no command {asked!r}", hint=RETIRED_HINTS.get(f"schedir {asked}", hint)
        )
    # Without a command, `--help` and the shell's completion list all commands.
    names = [asked] if asked in COMMANDS else [*COMMANDS]
    for name in names:
        about = COMMANDS[name]
        sub = subparsers.add_parser(name, help=about, description=about, allow_abbrev=False)
        if name == asked:  # importing all commands would take longer than most commands run
            command = import_command(name)
            sub.set_defaults(run=command.run)
            command.add_arguments(sub)
            _add_input_limits(sub)
            sub.extra_help = getattr(command, "format_epilog", None)
            sub.examples = getattr(command, "EXAMPLES", "")
            parser.command_parser = sub
    return parser


if __name__ == "__main__":
    sys.exit(main())
