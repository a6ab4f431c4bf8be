"""The commands: a row of `COMMANDS` and a file each. Files that begin with `_` help them.

    def arguments(parser: ArgumentParser) -> None     the options
    def run(args: Namespace) -> str | int             the output, the exit code, or a tuple of both

and, where --help has more to tell,

    def more() -> str                                 the text after the options

`args.typed` has the words that a person typed.  The file's name is the command's, with a `_`
where that is a word of Python.  Only the file of the command that runs is imported.
"""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword
from types import ModuleType
from typing import Final

# What each is for, in the order of --help.
COMMANDS: Final = {
    "show": "print a program's text, or write it to a file",
    "check": "prove that a program is complete and finishes",
    "simulate": "predict when each rank works, and how much it holds",
    "explain": "tell why ranks are idle, and simulate what would shorten the step",
    "draw": "draw runs on the terminal, as a picture, or as an interactive page",
    "where": "tell where a job that hangs stands, from dumps of its flight recorders",
    "compare": "compare schedules of one model side by side",
    "best": "rank all built-in schedules, and yours, for one model and plan",
    "plan": "plan a training run: the layout, schedule and options with the shortest step",
    "search": "search the shortest schedule that fits into a memory, and bound all others",
    "train": "train a model as a configuration says",
    "calibrate": "print the mean times of a run as --costs takes them",
    "export": "write a program or a run in the form that another system reads",
    "import": "read a CSV of torch.distributed.pipelining, or torch.profiler's traces of a run",
    "checkpoint": "look at checkpoints, or write the model of one for other tools",
}


def module_of(command: str) -> ModuleType:
    """Return the module of a command."""
    name = f"{command}_" if iskeyword(command) else command
    return import_module(f"{__name__}.{name}")
