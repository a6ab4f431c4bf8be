"""Build the page of a studio, for a server or as a file that contains all answers."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from schedir.analysis.progress_models import MODELS
from schedir.commands.common.program_options import PROGRAM_OPTIONS
from schedir.commands.studio.answers import Studio
from schedir.commands.studio.challenges import describe_challenges
from schedir.commands.studio.state import StudioState
from schedir.errors import UsageError
from schedir.io.files import atomic_write, describe_os_error
from schedir.schedules import get_built_in_schedules
from schedir.viz.html_page import build_page

_TITLE: Final = "schedir studio"
_MARKER: Final = f"<title>{_TITLE}</title>".encode()  # Only files with this title are replaced.
_COST_HELP: Final = "time of {} of one stage and microbatch, or one per stage: 1:1:2"
_HELP: Final = {
    "F": _COST_HELP.format("a forward"),
    "B": _COST_HELP.format("a full backward"),
    "I": _COST_HELP.format("the gradient of the inputs; by default half of B"),
    "W": _COST_HELP.format("the weight gradients; by default half of B"),
    "send": "time of a message between two ranks",
    "factors": "factors by which the computes of each stage take longer: 1:1:1.5",
    "other_costs": "further costs, as in --costs: step=1,R=1",
    "saved": "bytes of the activations that a forward saves, per stage and microbatch",
    "other_sizes": "further sizes, as in --sizes: params=2GB,activation=16MB",
    "memory_limit": "the most bytes that a rank may use",
    "progress_model": "the order in which the transport runs the messages of a rank",
    "more": "options of `schedir options`, separated by spaces",
}


def build_studio_page(
    studio: Studio, state: dict[str, Any], answers: dict[str, Any] | None = None
) -> str:
    """Return the page of a studio.

    Args:
        studio: The studio.
        state: The state that the page shows first.
        answers: Schedule -> answer for a page without a server. None for a page with a server.
    """
    first = studio.answer({"state": state})
    # If the first state has an error, the default state gives the texts and colours of the page.
    shown = studio.answer({}) if "error" in first else first
    data = shown | {
        "runs": [],
        "tables": None,
        "state": state,
        "schedules": sorted(get_built_in_schedules() if answers is None else answers),
        "progress_models": [*MODELS],
        "help": _collect_help(),
        "can_run_code": studio.expand_code is not None,
        "answer": first,
        "challenges": [] if answers is not None else describe_challenges(),
        "precomputed_answers": answers,
    }
    folder = files(__package__) / "page"
    style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("studio.css", "studio.js")
    )
    policy = "" if answers is not None else "; connect-src 'self'"
    return build_page(data, title=_TITLE, script=script, style=style, policy=policy)


def export_page(studio: Studio, state: StudioState, folder: str) -> str:
    """Write a page with the timelines of all built-in schedules that support a shape.

    Args:
        studio: The studio.
        state: The state that the page shows first.
        folder: The folder, which is created.

    Returns:
        A line with the name of the file.

    Raises:
        UsageError: The state has no built-in schedule, the file cannot be written, or the file
            exists and is not a page of a studio.
    """
    if state.code or state.program or state.run:
        raise UsageError(
            "--export writes a page of the built-in schedules: give the name of a "
            "schedule, not a file",
            fields=["source"],
        )
    answers = {}
    for schedule in dict.fromkeys([state.schedule, *sorted(get_built_in_schedules())]):
        options = state.to_json() | {"schedule": schedule}
        answer = studio.answer({"state": options})
        if "error" not in answer:
            answers[schedule] = answer
        elif schedule == state.schedule:
            raise UsageError(answer["error"]["message"])
    path = Path(folder) / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_foreign = path.exists() and _MARKER not in path.read_bytes()
    except OSError as error:
        raise UsageError(f"--export {folder}: {describe_os_error(error)}") from None
    if is_foreign:
        raise UsageError(
            f"--export {folder}: {path} exists, and schedir studio did not write it",
            hint="choose another folder",
        )
    with atomic_write(path) as temporary:
        page = build_studio_page(studio, state.to_json(), answers)
        temporary.write_text(page, encoding="utf-8")
    return f"wrote {path}, with {len(answers)} schedules\n"


def _collect_help() -> dict[str, str]:
    """Return name of a control -> description of its effect."""
    options = {name: option.help for name, option in PROGRAM_OPTIONS.items()}
    options["ranks"] = options["ranks"].partition(" (")[0]
    options["microbatches"] = options["microbatches"].partition(" (")[0]
    return options | _HELP
