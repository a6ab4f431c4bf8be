"""Load a schedule or a Program from its name: `zb_v`, FILE.py:NAME or FILE.sched."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from os import listdir
from os.path import exists, isdir, isfile  # Unlike Path.is_file, these allow names of any length.
from pathlib import Path
from traceback import extract_tb
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from schedir.errors import CommandHint, SchedirError, UsageError, describe_exception
from schedir.io.files import is_perfetto_export, open_regular_file, read_text
from schedir.io.timeline_file import TIMELINE_SUFFIX, load_timeline
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.input_trust import require_code_allowed
from schedir.ir.program import Program
from schedir.ir.text_format import from_text
from schedir.predict.timeline import Timeline
from schedir.schedules import get_built_in_schedules, suggest_schedules
from schedir.schedules.schedule_algebra import Schedule, weave

if TYPE_CHECKING:
    from typing import Self

# Loaded modules have this prefix, so that a user's random.py does not hide the module random.
_MODULE_PREFIX = "schedir_file_"


class Source(str):
    """The name of a schedule, program or run, which is loaded once, at its first use.

    Args:
        name: A name that `load_source` accepts. A Source is returned as it is.
    """

    def __new__(cls, name: str) -> Self:
        """Return `name` itself if it is a Source already."""
        return name if isinstance(name, cls) else super().__new__(cls, name)

    @classmethod
    def from_loaded(cls, found: Schedule | Program, name: str) -> Self:
        """Return a source for an object that is loaded already.

        Args:
            found: The schedule or the program.
            name: The name of the source in messages.
        """
        source = cls(name)
        vars(source)["schedule_or_program"] = found
        return source

    @cached_property
    def timeline(self) -> Timeline | None:
        """The run, or None if the source is not a run. Raises the errors of `load_timeline`."""
        return load_timeline(self) if self.endswith(TIMELINE_SUFFIX) else None

    @cached_property
    def schedule_or_program(self) -> Schedule | Program:
        """The schedule or the program. Raises the errors of `load_source`."""
        return load_source(self) if self.timeline is None else self.timeline.program

    def __reduce__(self) -> tuple[type[Source], tuple[str]]:
        # A process that unpickles the source loads it again, because not all functions can be
        # pickled.
        return Source, (str(self),)


def load_source(source: str) -> Schedule | Program:
    """Load a schedule or a Program by its name.

    Args:
        source: One of these: the name of a built-in schedule; `file.py:function`; `file.sched`; or
            `file.timeline`, for the program of this run. Options of a schedule may follow in
            brackets: `interleaved(group=4)`.

    Returns:
        The schedule or the program. A program in `file.sched` is parsed, not checked.

    Raises:
        UsageError: The name is unknown, or the file cannot be read or imported.
        ParseError: The file contains no program.
        TraceError: The file contains no run.
    """
    if source.endswith(")") and "(" in source:
        return _bind_options(source)
    path, colon, name = source.rpartition(":")
    if colon and path.endswith(".py"):
        return _load_function(path, name)
    if source.endswith(".sched"):
        return _load_program(source)
    if source.endswith(TIMELINE_SUFFIX):
        return load_timeline(source).program
    if source.endswith(".toml"):
        raise UsageError(f"{source} is a configuration, not a schedule", hint=f"--config {source}")
    if source.endswith(".py"):
        raise UsageError(f"{source} lacks the name of a function", hint=f"{source}:NAME")
    built_in = get_built_in_schedules()
    if source not in built_in:
        raise UsageError(
            f"{source!r} is not a built-in schedule, a file.py:function, a file.sched or a "
            "file.timeline",
            hint=suggest_source(source) or suggest_schedules(source, [*built_in]),
        )
    return built_in[source]


def require_schedule_names(sources: Sequence[str]) -> None:
    """Raise one error if several names of built-in schedules are wrong.

    `load_source` raises the error for a single wrong name.

    Args:
        sources: The sources of a command. Names of files are not checked.

    Raises:
        UsageError: Several names are unknown.
    """
    built_in = [*get_built_in_schedules()]
    unknown = [
        name
        for name in dict.fromkeys(sources)
        if re.fullmatch(r"[\w-]+", name) and name not in built_in and not exists(name)
    ]
    if len(unknown) > 1:
        hints = [f"{name}: {suggest_schedules(name, built_in)}" for name in unknown]
        names = ", ".join(map(repr, unknown))
        raise UsageError(f"there are no built-in schedules {names}", hint="; ".join(hints))


def suggest_source(source: str) -> str:
    """Return a hint for a name that `load_source` does not accept, or an empty string.

    Args:
        source: The name of the source.
    """
    if source.endswith(".toml"):
        return f"--config {source} reads the options of a configuration"
    if source.endswith(".csv"):
        return f"schedir import {source} converts torch's CSV to a program"
    if source.endswith((".sched.gz", f"{TIMELINE_SUFFIX}.gz")):
        return f"gunzip {source}"
    if hint := suggest_separator(source):
        return hint
    if match := re.fullmatch(r"([\w./:-]+)\[(.+)\]", source):  # as in interleaved[group=4]
        return f"write options in round brackets: '{match[1]}({match[2]})'"
    if isfile(source) and source.endswith((".txt", ".text", ".prog", ".program")):
        return f"the name of a program must end in .sched, and that of a run in {TIMELINE_SUFFIX}"
    if timeline := _find_timeline(source):
        return f"did you mean {timeline}?"
    if isfile(source) and _is_trace(source) and is_perfetto_export(Path(source)):
        return f"give the FILE.timeline or FILE.sched that was exported to {source}"
    if _is_trace(source):
        folder = source if isdir(source) else str(Path(source).parent)
        words = shlex.join(["schedir", "import", folder, "-o", "run.timeline"])
        return f"{words} reads torch.profiler traces of all ranks"
    path, _, name = source.replace("::", ":").replace(".py:", ":").rpartition(":")
    path, name = (path, name) if path else source.rpartition(".")[::2]
    if path and isfile(f"{path}.py"):
        return f"did you mean {path}.py:{name}?"
    suffixes = [suffix for suffix in (".sched", TIMELINE_SUFFIX) if isfile(source + suffix)]
    return f"did you mean {source}{suffixes[0]}?" if suffixes else ""


def suggest_separator(source: str) -> str:
    """Return a hint for commas between schedules, or for a space before a cost or a size.

    Args:
        source: The name of the source.

    Returns:
        The hint. It is empty if the separators are right.
    """
    sources = source.split(",")
    if len(sources) > 1 and "(" not in source and all(sources):
        return CommandHint("give one schedule", f"write spaces, not commas: {' '.join(sources)}")
    name, _, value = source.partition("=")
    names = {"--costs": Costs.__dataclass_fields__, "--sizes": Sizes.__dataclass_fields__}
    for option, fields in names.items():
        if value[:1].isdigit() and name in fields:
            return f"write commas, not spaces, between the values of {option}: ...,{source}"
    return ""


def _find_timeline(source: str) -> str:
    """Return the path of a run in a folder or in one of its subfolders, or an empty string.

    Args:
        source: The path of the folder, or of the `summary.json` that `schedir train` writes to it.
    """
    folder = Path(source).parent if Path(source).name == "summary.json" else Path(source)
    if not isdir(folder):
        return ""
    patterns = f"*{TIMELINE_SUFFIX}", f"*/*{TIMELINE_SUFFIX}"
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return str(paths[0]) if paths else ""


def _is_trace(source: str) -> bool:
    """Return whether a source is a JSON file, perhaps compressed, or a folder with JSON files."""
    suffixes = (".json", ".json.gz")
    if source.endswith(suffixes):
        return True
    return isdir(source) and any(name.endswith(suffixes) for name in listdir(source))


def _bind_options(source: str) -> Schedule:
    name, _, arguments = source.partition("(")
    schedule = load_source(name.strip())
    if isinstance(schedule, Program):
        raise UsageError(f"{name} is a program: options in brackets apply only to schedules")
    options = {}
    try:
        call = ast.parse(f"f({arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        for option in call.keywords:
            if option.arg is None:
                raise ValueError
            options[option.arg] = _parse_literal(name, option.arg, option.value)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(
            f"the options of {source!r:.200} cannot be read",
            hint=f"put text in quotes, as in \"{name}(option=1, other='text')\"",
        ) from None
    # The first three parameters are rank, ranks and microbatches.
    option_names = list(signature(schedule).parameters)[3:]
    if bad_options := [option for option in options if option not in option_names]:
        hint = (
            suggest_schedules(bad_options[0], option_names)
            if option_names
            else f"{name} has no options"
        )
        raise UsageError(f"{name} has no option {bad_options[0]!r}", hint=hint)
    return partial(schedule, **options)


def _parse_literal(name: str, option: str, value: ast.expr) -> object:
    """Return the value of an option: a number, text, bool, None, or a list of these."""
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError):
        value_text = ast.unparse(value)
        raise UsageError(
            f"{name}: {option}={value_text} is not a value",
            hint="put text in quotes, and for the shell, put the schedule in other quotes: "
            f"\"{name}({option}='{value_text}')\""
            if isinstance(value, ast.Name | ast.Attribute)
            else "a value is a number, text in quotes, True, False, None, or a list of these",
        ) from None


def _load_program(path: str) -> Program:
    with open_regular_file(path) as file:
        if file.read(2) == b"PK":  # a ZIP archive
            raise UsageError(
                f"{path} contains no program: it may be a run, whose file must end in .timeline",
                hint=f"rename the file to {path.removesuffix('.sched')}.timeline",
            )
    text = read_text(path)
    try:
        return from_text(text)
    except SchedirError as error:
        error.add_note(f"in {path}")
        raise


def _load_function(path: str, name: str) -> Schedule:
    module = _load_module(path)
    value = getattr(module, name, None)
    if not callable(value):
        functions = [
            k
            for k, v in vars(module).items()
            if isinstance(v, FunctionType) and v.__module__ != weave.__module__
        ]
        raise UsageError(
            f"{path} has no function {name!r}",
            hint=suggest_schedules(name, functions) if functions else "the file has no functions",
        )
    schedule: Schedule = value
    return schedule


def _load_module(path: str) -> ModuleType:
    """Import a user's Python file, with its folder first on `sys.path` as in `python file.py`."""
    open_regular_file(path).close()  # Raises UsageError if it is not a regular file.
    require_code_allowed(path)
    name = _MODULE_PREFIX + Path(path).stem
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes SystemExit
        raise UsageError(f"{path} cannot be imported: {describe_exception(error)}") from error
    finally:
        sys.path.pop(0)
    return module


def find_error_origin(error: BaseException) -> str:
    """Return the line of a user's file in which an error was raised.

    Args:
        error: An error with a cause. The chain of causes is searched.

    Returns:
        "file:line: text", or "" if no cause was raised in a file that `load_source` has loaded.
    """
    files = {m.__file__ for name, m in list(sys.modules.items()) if name.startswith(_MODULE_PREFIX)}
    frames, cause = [], error.__cause__
    while cause:  # Causes may be nested: Python wraps a StopIteration in a RuntimeError.
        frames += [f for f in extract_tb(cause.__traceback__) if f.filename in files]
        cause = cause.__cause__
    if not frames:
        return ""
    path, folder = Path(frames[-1].filename), Path.cwd()
    path = path.relative_to(folder) if path.is_relative_to(folder) else path
    return f"{path}:{frames[-1].lineno}: {frames[-1].line}"
