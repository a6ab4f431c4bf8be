"""Generate the museum of hangs and its pictures from `tests/museum/`."""

from __future__ import annotations

from difflib import unified_diff
from functools import partial
from textwrap import fill

from docs import pages
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

# The attributes that the page leaves out, because they are the defaults.
DEFAULTS = "tp 1  dp 1  tied_weights no  clip_grad_norm no\n"


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
    parts = [
        f"### {case.title}",
        f"{', '.join(map(format_source_link, case.sources)) or _format_file_link(case)}",
    ]
    for name, text in (
        ("Seen", case.seen),
        ("Analysis", case.follows),
        ("Not confirmed", case.unconfirmed),
        ("Why there is no program", case.missing),
    ):
        if text:
            parts.append(fill(f"**{name}.** {text.strip()}", 118, break_on_hyphens=False))
    if case.runs:
        rows = [f"rank {rank}: {', '.join(row)}" for rank, row in enumerate(case.runs)]
        parts.append("```\n" + "\n".join(rows) + "\n```")
    if case.replicas:
        rows = [f"replica {number}: {name}" for number, name in enumerate(case.replicas)]
        parts.append("```\n" + "\n".join(rows) + "\n```")
    if is_drawn(case):
        parts.append(f"![{case.title}](../images/museum/{case.name}.svg)")
    if refusal := find_refusal(case) if case.is_said else None:
        model, error = refusal
        parts.append(
            f"{format_conditions(case, model)}\n\n```\n{type(error).__name__}: {error}\n```"
        )
    elif case.is_said:
        parts.append("The program finishes under every progress model.")
    if case.steps:
        texts = "\n".join(text.replace(DEFAULTS, "").strip() + "\n" for text in case.steps.values())
        parts.append(format_details("The programs", f"```\n{texts.strip()}\n```"))
    if text := case.program.replace(DEFAULTS, "") or case.make:
        parts.append(format_details("The program", f"```\n{text.strip()}\n```"))
    if case.mended:
        summary = "The correction: the program then finishes under every progress model"
        parts.append(format_details(summary, f"```diff\n{format_correction(case)}\n```"))
    return "\n\n".join(parts)


def format_correction(case: Case) -> str:
    """Return the corrected Streams, with the lines that the correction removes and adds."""
    before, after = (text.strip().splitlines() for text in (case.program, case.mended))
    ranks: list[list[str]] = [[]]
    for line in unified_diff(before, after, lineterm="", n=len(before)):
        ranks += [[]] * line.startswith(" rank")
        ranks[-1] = [*ranks[-1], line.rstrip()]
    changed = [rank for rank in ranks[1:] if any(line[:1] in ("+", "-") for line in rank)]
    return "\n".join("\n".join(rank).strip("\n") for rank in changed)


def format_details(summary: str, text: str) -> str:
    """Return a collapsible block."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def format_conditions(case: Case, model: ProgressModel) -> str:
    """Return the line above an error: the conditions under which the checker raises it."""
    if all(case.expected(other) for other in MODELS) and not (case.activation or case.show):
        return "Under every progress model:"
    lazy_text = " with `--lazy-communicators`" * (model in case.lazy)
    limit = format_bytes(case.activation).replace(" ", "")
    size_text = f" (with `--eager-limit {limit}` the program finishes under every progress model)"
    return f"Under `{model}`{lazy_text}{size_text * bool(case.activation)}:"


def format_verdicts(shown_cases: list[Case]) -> str:
    """Return two tables of verdicts: cases that depend on the model, and all other cases."""
    model_rows, other_rows = [], []
    for case in shown_cases:
        verdicts = [
            shorten_error_name(case.lazy[model]) + " (lazy)"
            if model in case.lazy
            else shorten_error_name(case.expected(model))
            for model in MODELS
        ]
        name = f"[{case.title}](#{make_anchor(case.title)})"
        if len({*verdicts}) > 1:
            model_rows.append([name, *verdicts])
        else:
            error = f"`{case.expected('per_device')[0]}`" if case.refused else "-"
            other_rows.append([name, error])
    by_model = pages.format_table(["case", *(f"`{model}`" for model in MODELS)], model_rows)
    return f"{by_model}\n\n{pages.format_table(['case', 'under every progress model'], other_rows)}"


def shorten_error_name(verdict: list[str]) -> str:
    """Return the short name of an error, for a cell of the table."""
    return verdict[0].removesuffix("Error").removesuffix("Limit").lower() if verdict else "-"


def build_blocks() -> dict[str, object]:
    """Return the table of all cases, and the chapters with their cases."""
    programs = [case for case in CASES if case.is_said]
    chapters = ""
    for chapter, title in CHAPTERS.items():
        sections = [format_case(case) for case in CASES if case.chapter == chapter]
        chapters += "\n\n".join([f"## {title}", *sections]) + "\n\n" if sections else ""
    return {
        "cases": len(CASES),
        "programs": len(programs),
        "table": format_verdicts(programs),
        "chapters": chapters,
    }


CASES = cases()
PAGES = pages.define_page("reference/museum", build_blocks)
PAGES |= {f"images/museum/{c.name}.svg": partial(draw_picture, c) for c in CASES if is_drawn(c)}
