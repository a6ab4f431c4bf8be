"""Complete names of schedules, options and files in a shell, with argcomplete."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Final

from schedir.commands import COMMANDS


def answer_completion_request(
    build_parser: Callable[[list[str]], argparse.ArgumentParser],
) -> None:
    """Write the completions of the line that a user types, and exit.

    Args:
        build_parser: A function that returns a parser. Its argument is a list with the command, or
            an empty list for a parser without a command.
    """
    import argcomplete

    line = os.environ.get("COMP_LINE", "")
    # A command at the end of the line may be the beginning of a longer name: check, checkpoint.
    words = (line + "|").split()[1:2]
    parser = build_parser(words if words and words[0] in COMMANDS else [])
    for action in _list_actions(parser):
        if action.dest in _NAMES:
            action.completer = _make_completer(  # type: ignore[attr-defined]
                *_NAMES[action.dest], takes_files=action.dest not in _NAMES_ONLY
            )
    argcomplete.autocomplete(parser)


def _make_completer(module: str, attribute: str, *, takes_files: bool) -> Callable[..., list[str]]:
    """Return a completer for a value that is one of several names, or perhaps a file.

    `module` has the names, or a function that returns them, as `attribute`.
    """

    def complete(prefix: str, **_: object) -> list[str]:
        from argcomplete.completers import FilesCompleter

        names = getattr(import_module(module), attribute)
        names = names() if callable(names) else names
        return [*names, *(FilesCompleter()(prefix) if takes_files else ())]

    return complete


# `dest` of an argument -> module and name of the names to complete, or of a function that returns
# them. All other arguments take files, or have `choices`.
_SCHEDULES: Final = ("schedir.schedules", "get_built_in_schedules")
_PROGRAM_OPTIONS: Final = ("schedir.commands.common.program_options", "PROGRAM_OPTIONS")
_NAMES: Final = {
    "source": _SCHEDULES,
    "program": _SCHEDULES,
    "initial_schedules": _SCHEDULES,
    "schedules": _SCHEDULES,
    "progress_model": ("schedir.analysis.progress_models", "MODELS"),
    "program_options": _PROGRAM_OPTIONS,
    "name": _PROGRAM_OPTIONS,
    "model": ("schedir.planner.transformer.model_presets", "MODEL_PRESETS"),
    "cluster": ("schedir.planner", "cluster_presets"),
    "palette": ("schedir.viz.palette", "PALETTES"),
    "stack": ("schedir.planner", "stack_presets"),
}
# The arguments of `_NAMES` that take no files.
_NAMES_ONLY: Final = {"progress_model", "program_options", "name", "palette", "stack"}


def _list_actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    """Yield the arguments of a parser and of its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _list_actions(subparser)
