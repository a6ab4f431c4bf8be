"""The commands of the command line: one module and one row of `COMMANDS` for each command.

The module has the name of its command, with a trailing "_" if the name is a Python keyword. Only
the module of the command that runs is imported. `common` contains code that several commands use.
A module has two functions:

    def add_arguments(parser: ArgumentParser) -> None  adds the options
    def run(args: Namespace) -> str | int              returns output, exit code, or both in a tuple

A module may also define texts that `--help` prints after the options:

    EXAMPLES = "..."                                   lines with example commands
    def format_epilog() -> str                         returns a text that takes long to compute

`args.command_words` contains the words of the command line, as the user typed them.
"""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword
from types import ModuleType
from typing import Final

# The one-line help of each command, in the order of --help.
COMMANDS: Final = {
    "schedules": "list the built-in schedules",
    "compile": "compile a schedule into a program, and write it to a file",
    "print": "print the text of a program",
    "check": "prove that a program is complete and finishes",
    "simulate": "predict when each rank works, and how much memory it uses",
    "explain": "explain why ranks are idle, and simulate changes that shorten the step",
    "recognize": "name the built-in schedule that a program follows, or the most similar one",
    "studio": "design a schedule in the browser: change it, and see its timeline",
    "draw": "draw schedules or runs on the terminal, as a picture, or as an interactive page",
    "diagnose": "find where a job hangs, from its flight recorder dumps or black boxes",
    "compare": "compare schedules of one model side by side",
    "recommend": "rank all built-in schedules, and your own, for one model and shape",
    "plan": "plan a training run: the layout, schedule and options with the shortest step",
    "search": "search for the shortest schedule within a memory limit, and prove a bound",
    "train": "train a model from a configuration file",
    "calibrate": "print the mean times of a run as a value for --costs",
    "export": "write a program or a run in the file format of another system",
    "import": "read a CSV of torch.distributed.pipelining, or torch.profiler traces of a run",
    "checkpoint": "inspect checkpoints, or export a model from one for other tools",
    "examples": "write the example files of the documentation to a folder",
    "completion": "print the code that completes names and options in a shell",
    "options": "list the options for compiling a schedule (-O NAME=VALUE)",
}


def import_command(command: str) -> ModuleType:
    """Return the module of a command.

    Args:
        command: The name of the command, a key of `COMMANDS`.
    """
    name = f"{command}_" if iskeyword(command) else command
    return import_module(f"{__name__}.{name}")
