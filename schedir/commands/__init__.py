"""The commands: a file each, found by listing this folder.  What begins with `_` is none.

    ABOUT: str                                        one line, for --help
    ORDER: int                                        where --help lists it; left out, at the end
    def arguments(parser: ArgumentParser) -> None     what it takes
    def run(args: Namespace) -> str | int             what it says at its end, or its exit code,
                                                      or a tuple of both

and, where --help has more to tell,

    def more() -> str                                 what follows its options

`args.typed` has the words that a person typed.  The file's name is the command's, with a `_`
where that is a word of Python.  Each imports what it needs when it runs: --help must not wait for
what it does not show.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def files() -> dict[str, str]:
    """By the name of each command, that of its module."""
    names = [found.name for found in iter_modules(__path__) if not found.name.startswith("_")]
    return {name.rstrip("_"): f"{__name__}.{name}" for name in names}


def listed() -> dict[str, ModuleType]:
    """All commands, in the order of --help."""
    modules = {name: import_module(module) for name, module in sorted(files().items())}
    return dict(sorted(modules.items(), key=lambda found: getattr(found[1], "ORDER", len(modules))))
