"""Generate the museum of hangs and its pictures from `tests/museum/`."""

from __future__ import annotations

from functools import partial
from textwrap import fill

from docs import pages
from docs.pages import format_cell_text
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.errors import (
    ChannelMismatchError,
    DeadlockError,
    GroupError,
    SchedirError,
    format_bytes,
)
from schedir.viz.deadlock_diagram import draw_deadlock
from tests.museum.cases import CHAPTERS, Case, cases


def find_refusal(case: Case) -> tuple[ProgressModel, SchedirError] | None:
    """Return the progress model and the error that the page shows for a case.

    The model is `per_device` if it refuses the program, and otherwise the first that refuses it.

    A case can set the model in `show`. For a case about lazy communicators, the error is that with
    lazy communicators.
    """
    if case.show:
        error = case.refusal(case.show, lazy_communicators=case.show in case.lazy)
        return (case.show, error) if error else None
    for model in ("per_device", *MODELS):
        if error := case.refusal(model):
            return model, error
    return None


def is_drawn(case: Case) -> bool:
    """Return whether the page draws a case: ranks wait for each other, or messages cross."""
    refusal = find_refusal(case) if case.program else None
    if refusal is None or not isinstance(
        refusal[1], DeadlockError | GroupError | ChannelMismatchError
    ):
        return False
    return len(refusal[1].sites) > 1


def draw_picture(case: Case) -> str:
    """Draw the instruction at which each rank waits."""
    refusal = find_refusal(case)
    assert refusal is not None
    return draw_deadlock(case.made(), refusal[1])


def _format_file_link(case: Case) -> str:
    """Return a link to the file with a case that has no public issue."""
    return f"[{case.here}](../../{case.here})"


def format_source_link(source: str) -> str:
    """Return a link to an issue or a pull request."""
    repository, _, number = source.partition("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"


def make_anchor(title: str) -> str:
    """Return the anchor of a heading."""
    characters = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return characters.replace(" ", "-")


def format_case(case: Case) -> str:
    """Return the section of the page about a case."""
    links = ", ".join(map(format_source_link, case.sources)) or _format_file_link(case)
    entries = [
        (f"- **Seen** in {links}: ", case.seen),
        (f"- **Analysis**{format_program_links(case)}: ", case.follows),
        ("- **Not confirmed**: ", case.unconfirmed),
        ("- **Error**: ", format_result(case) if case.is_said else ""),
    ]
    lines = [
        fill(
            f"{label}{text.strip()}",
            118,
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for label, text in entries
        if text
    ]
    parts = [f"### {case.title}", "\n".join(lines)]
    if is_drawn(case):
        parts.append(f"![{case.title}](../images/museum/{case.name}.svg)")
    return "\n\n".join(parts)


def format_result(case: Case) -> str:
    """Return the command that checks a case, and the first line of its error."""
    refusal = find_refusal(case)
    error = f"`{format_first_line(refusal[1])}`" if refusal else "no error."
    return f"`{format_command(case)}` prints {error}"


def format_program_links(case: Case) -> str:
    """Return links to the programs of a case, and to its corrected program."""
    rows = case.runs or [case.replicas or [case.name] * bool(case.program)]
    names = [*dict.fromkeys(name for row in rows for name in row)]
    links = ", ".join(f"[{name}](../../tests/museum/{name}.sched)" for name in names)
    corrected = f" ([corrected](../../tests/museum/{case.name}.corrected.sched))"
    return f" of {links}{corrected * bool(case.corrected)}" * bool(links)


def format_first_line(error: SchedirError) -> str:
    """Return the first line that a command prints about an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def format_command(case: Case) -> str:
    """Return the command that checks the programs of a case, in the folder of the museum."""
    refusal = find_refusal(case)
    model = refusal[0] if refusal else "per_device"
    options = [f"--progress-model {model}"] * (model != "per_device")
    options += ["--lazy-communicators"] * (model in case.lazy)
    if case.activation:
        options.append(f"--sizes activation={format_bytes(case.activation).replace(' ', '')}")
    if case.runs:
        longest = max(case.runs, key=len)
        arguments = " ".join(f"{name}.sched" for name in longest)
        options += [
            f"--rank-programs {rank}:{'+'.join(f'{name}.sched' for name in row)}"
            for rank, row in enumerate(case.runs)
            if row != longest
        ]
    elif case.replicas:
        arguments = " ".join(["--replicas", *(f"{name}.sched" for name in case.replicas)])
    else:
        arguments = " ".join(case.arguments.split()) or f"{case.name}.sched"
    return " ".join(["schedir check", arguments, *options])


def format_verdicts(shown_cases: list[Case]) -> str:
    """Return the table of cases with an error that depends on the progress model."""
    rows = []
    for case in shown_cases:
        verdicts = [
            shorten_error_name(case.lazy[model]) + " (lazy)"
            if model in case.lazy
            else shorten_error_name(case.expected(model))
            for model in MODELS
        ]
        if len({*verdicts}) > 1:
            rows.append([f"[{case.title}](#{make_anchor(case.title)})", *verdicts])
    return pages.format_table(["case", *(f"`{model}`" for model in MODELS)], rows)


def shorten_error_name(verdict: list[str]) -> str:
    """Return the name of an error without "Error", for a cell of the table."""
    return verdict[0].removesuffix("Error") if verdict else "-"


def format_other_cases(other_cases: list[Case]) -> str:
    """Return the table of the cases without a program."""
    rows = [
        [
            case.title,
            f"{format_cell_text(case.seen)} "
            f"({', '.join(map(format_source_link, case.sources)) or _format_file_link(case)})",
            format_cell_text(case.missing),
        ]
        for case in other_cases
    ]
    return pages.format_table(["case", "seen", "why there is no program"], rows)


def build_blocks() -> dict[str, object]:
    """Return the table of all cases, and the chapters with their cases."""
    programs = [case for case in CASES if case.is_said]
    chapters = ""
    for chapter, title in CHAPTERS.items():
        sections = [
            format_case(case) for case in CASES if case.chapter == chapter and not case.missing
        ]
        chapters += "\n\n".join([f"## {title}", *sections]) + "\n\n" if sections else ""
    return {
        "cases": len(CASES),
        "programs": len(programs),
        "table": format_verdicts(programs),
        "others": format_other_cases([case for case in CASES if case.missing]),
        "chapters": chapters.rstrip() + "\n",
    }


CASES = cases()
PAGES = pages.define_page("reference/museum", build_blocks)
PAGES |= {f"images/museum/{c.name}.svg": partial(draw_picture, c) for c in CASES if is_drawn(c)}
