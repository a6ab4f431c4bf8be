"""Complete names of schedules, options and files in a shell, with argcomplete."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
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
        if (make_names := _NAMES.get(action.dest)) is not None:
            action.completer = _Completer(  # type: ignore[attr-defined]
                make_names, takes_files=action.dest not in _NAMES_ONLY
            )
    argcomplete.autocomplete(parser)


class _Completer:
    """Completes an argument whose value is one of several names, or perhaps a file.

    Args:
        make_names: A function that returns the names.
        takes_files: True if the value can also be a file.
    """

    def __init__(self, make_names: Callable[[], Iterable[str]], *, takes_files: bool) -> None:
        self.make_names = make_names
        self.takes_files = takes_files

    def __call__(self, prefix: str, **_: object) -> list[str]:
        """Return all names, and if the value can be a file, the files that begin with a prefix.

        Args:
            prefix: The typed part of the word.
        """
        from argcomplete.completers import FilesCompleter

        return [*self.make_names(), *(FilesCompleter()(prefix) if self.takes_files else ())]


def _list_schedules() -> Iterable[str]:
    from schedir.schedules import get_built_in_schedules

    return get_built_in_schedules()


def _list_progress_models() -> Iterable[str]:
    from schedir.analysis.progress_models import MODELS

    return MODELS


def _list_program_options() -> Iterable[str]:
    from schedir.commands.common.program_options import PROGRAM_OPTIONS

    return PROGRAM_OPTIONS


def _list_models() -> Iterable[str]:
    from schedir.planner.transformer.model_presets import MODEL_PRESETS

    return MODEL_PRESETS


def _list_clusters() -> Iterable[str]:
    from schedir.planner import cluster_presets

    return cluster_presets()


def _list_palettes() -> Iterable[str]:
    from schedir.viz.palette import PALETTES

    return PALETTES


def _list_stacks() -> Iterable[str]:
    from schedir.planner import stack_presets

    return stack_presets()


# `dest` of an argument -> function that returns the names to complete. All other arguments take
# files, or have `choices`.
_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "source": _list_schedules,
    "program": _list_schedules,
    "initial_schedules": _list_schedules,
    "schedules": _list_schedules,
    "progress_model": _list_progress_models,
    "program_options": _list_program_options,
    "name": _list_program_options,
    "model": _list_models,
    "cluster": _list_clusters,
    "palette": _list_palettes,
    "stack": _list_stacks,
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
