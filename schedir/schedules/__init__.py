"""The built-in schedules.

A schedule is a function of the rank r, the number of ranks P and the number of microbatches m.
Schedules for any number of stages per rank also have the parameter `v`, which is this number.
The docstrings use these terms:

- F, I, W and B = I + W are the costs of one stage for one microbatch. So the compute of a rank with
  v stages takes v m (F + B). Papers on zero-bubble schedules call our I "B".
- Idle time is the time in which a rank does not compute, between the first start and the last end
  of all ranks (`Timeline.idle`). `Timeline.idle_in_active_span` counts idle time only between the
  first start and the last end of the rank.
- Ideal time is the compute time of a rank.
- Timelines have F = I = W = 1, unless an example sets `costs`. A letter begins an instruction, `--`
  continues it, and dots are idle time. The number of ' characters is the local stage.

Example:
    >>> from schedir import PipelineShape, compile, schedules, simulate
    >>> shape = PipelineShape(ranks=4, microbatches=8)
    >>> for schedule in (schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1):
    ...     run = simulate(compile(schedule, shape))
    ...     print(f"{run.program.name}: {run.bubble:.1%} idle, peak {run.peak_in_flight.max()}")
    gpipe: 27.3% idle, peak 8
    one_f_one_b: 27.3% idle, peak 4
    zb_h1: 11.1% idle, peak 4
"""

from collections.abc import Sequence
from difflib import get_close_matches
from inspect import getdoc

from schedir.errors import UsageError, describe
from schedir.other_libraries import OTHER_SCHEDULE_NAMES
from schedir.schedules.bidirectional import bitpipe, chimera, dualpipe
from schedir.schedules.building_blocks import v_half, v_min, wave
from schedir.schedules.interleaved_schedules import (
    interleaved,
    interleaved_zb,
    looped_bfs,
    looped_dfs,
)
from schedir.schedules.pipedream import pipedream_2bw
from schedir.schedules.schedule_algebra import Schedule
from schedir.schedules.single_stage import eager_1f1b, forward_only, gpipe, one_f_one_b
from schedir.schedules.v_shape import dualpipe_v, zb_v
from schedir.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "bitpipe",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "eager_1f1b",
    "forward_only",
    "gpipe",
    "interleaved",
    "interleaved_zb",
    "looped_bfs",
    "looped_dfs",
    "one_f_one_b",
    "pipedream_2bw",
    "v_half",
    "v_min",
    "wave",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


def get_built_in_schedules() -> dict[str, Schedule]:
    """Return the built-in schedules by name.

    Returns:
        The schedule functions, in the order of `__all__`.
    """
    return {name: globals()[name] for name in __all__}


def get_summary(schedule: Schedule) -> str:
    """Return one sentence about a schedule: the first line of its docstring, without "Run".

    Args:
        schedule: The schedule function.
    """
    return (getdoc(schedule) or "").partition("\n")[0].removeprefix("Run ")


def find_schedule(name: str) -> Schedule:
    """Return the built-in schedule of this name.

    Args:
        name: A name such as `"zb_v"`.

    Returns:
        The schedule function.

    Raises:
        UsageError: No built-in schedule has this name. The hint has the nearest name.

    Example:
        >>> find_schedule("gpipe").__name__
        'gpipe'
    """
    schedules = get_built_in_schedules()
    if name not in schedules:
        base, bracket, options = name.partition("(")
        if bracket and base in schedules:
            hint = f"functools.partial(schedir.schedules.{base}, {options.rstrip(')')})"
        elif name.endswith(".sched"):
            hint = f"schedir.from_text(Path({name!r}).read_text()) reads the program of this file"
        elif ".py:" in name:
            hint = "import the function, and give the function instead of its name"
        else:
            hint = suggest_schedules(name, [*schedules])
        raise UsageError(f"there is no built-in schedule {describe(name)}", hint=hint)
    return schedules[name]


def suggest_schedules(name: str, known: Sequence[str]) -> str:
    """Return a hint with the name that is nearest to a wrong name, or with all names.

    Args:
        name: The wrong name. Names of torch's classes, such as "ScheduleZBVZeroBubble", are
            recognized.
        known: The names that are valid.

    Returns:
        A phrase for the hint of an error.
    """
    # The names of torch's classes begin with "Schedule".
    normalized_name = name.lower().replace("-", "_").removeprefix("schedule")
    names = {"1f1b": "one_f_one_b", "vzerobubble": "_v", "zerobubble": "_zb"}
    replaced_names = (normalized_name.replace(old, new) for old, new in names.items())
    candidates = [normalized_name, *replaced_names]
    # "interleaved_1f1b" is interleaved 1F1B, although "interleaved_zb" has more letters in common
    # with this name.
    exact_names = [
        normalized_name.replace("1f1b", "").strip("_"),
        OTHER_SCHEDULE_NAMES.get(normalized_name, ""),
        *candidates,
    ]
    matches = [candidate for candidate in exact_names if candidate in known]
    matches += [
        match for candidate in candidates for match in get_close_matches(candidate, known, 1)
    ]
    return f"did you mean {matches[0]!r}?" if matches else f"the schedules are {', '.join(known)}"
