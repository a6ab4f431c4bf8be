"""The command `studio`: design a schedule in the browser."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import webbrowser
from threading import Thread
from typing import TYPE_CHECKING, Final

from schedir.commands.common.schedule_options import (
    SOURCE_HELP,
    add_compile_options,
    parse_count,
)
from schedir.errors import UsageError

if TYPE_CHECKING:
    from schedir.commands.studio.answers import Studio
    from schedir.commands.studio.state import StudioState
    from schedir.io.source_loader import Source

# The options that the page shows first. Options of the command line replace these options.
DEFAULTS: Final = {
    "ranks": "4",
    "microbatches": "8",
    "costs": "F=1,B=2,send=0.1",
    "sizes": "saved=1GB",
}
MAX_INSTRUCTIONS: Final = 300_000  # With a larger program, each change takes seconds.

EXAMPLES = """\
  schedir studio zb_h1 --ranks 8 --microbatches 16
  schedir studio run.timeline --no-browser --port 8080
  schedir studio --ranks 8 --microbatches 16 --export site

The page docs/how-to/design-in-the-browser.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `studio`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "source", metavar="SCHEDULE", nargs="?", default="one_f_one_b",
        help=f"{SOURCE_HELP} (one_f_one_b)",
    )  # fmt: skip
    parser.add_argument(
        "--port",
        type=parse_count,
        default=0,
        metavar="N",
        help="the port of the page (default: a free port)",
    )
    parser.add_argument(
        "--no-browser", action="store_true",
        help="print the address of the page, but open no browser; if the studio is on a remote "
        "host, forward its port with ssh -L N:127.0.0.1:N",
    )  # fmt: skip
    parser.add_argument(
        "--export", metavar="FOLDER",
        help="write FOLDER/index.html, a page that needs no server; the page shows the timelines "
        "of all built-in schedules for the given program options",
    )  # fmt: skip
    add_compile_options(parser)


def run(args: argparse.Namespace) -> int | str:
    """Serve the page until Ctrl-C, or export it.

    Args:
        args: The parsed options of `studio`.

    Raises:
        UsageError: A file cannot be read, an option does not apply to its program, or the port
            cannot be used.
    """
    from schedir.commands.studio.answers import Studio
    from schedir.commands.studio.code_process import CodeRunner
    from schedir.commands.studio.server import StudioServer
    from schedir.commands.studio.studio_page import export_page
    from schedir.ir.input_trust import input_limits

    for name in ("config", "cluster", "relower"):
        if getattr(args, name, None):
            raise UsageError(f"schedir studio does not support --{name}", fields=[name])
    state, opened = _make_state(args)
    if args.export is not None:
        return export_page(Studio(opened), state, args.export)
    max_instructions = args.max_instructions or MAX_INSTRUCTIONS
    runner = None if args.no_code else CodeRunner(max_instructions)
    try:
        studio = Studio(opened, None if runner is None else runner.expand)
        server = StudioServer(studio, state.to_json(), args.port)
        Thread(target=load_compiled_loops, args=[studio], daemon=True).start()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        print(f"studio: {server.url}\nCtrl-C stops it", flush=True)
        if not args.no_browser and _has_display():
            webbrowser.open(server.url)
        with input_limits(max_instructions=max_instructions, allow_code=False):
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        if runner is not None:
            runner.close()
        os._exit(130)  # With Numba loaded, a normal exit of Python takes a second or two.
    finally:
        if runner is not None:
            runner.close()
    return 0


def load_compiled_loops(studio: Studio) -> None:
    """Load the functions that Numba compiles, so that no later answer waits for them.

    Args:
        studio: The studio.
    """
    from schedir.analysis.numba_jit import enable_numba, is_installed

    if is_installed():
        enable_numba()
        studio.answer({"state": {"options": DEFAULTS}})


def _has_display() -> bool:
    """Return whether this machine has a display for a browser window."""
    names = ("DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform == "darwin" or any(os.environ.get(name) for name in names)


def _make_state(args: argparse.Namespace) -> tuple[StudioState, Source | None]:
    """Return the first state of the page, and the source if it is a run.

    For other sources, the second result is None.
    """
    from schedir.commands.studio.state import StudioState, applies_to
    from schedir.io.files import read_text
    from schedir.io.option_spelling import option_name
    from schedir.io.source_loader import Source

    options = read_options(args.command_words)
    path, colon, function = args.source.rpartition(":")
    source = Source(args.source)
    loaded = source.schedule_or_program  # Raises an error if the file is wrong.
    for name in options:
        if not applies_to(name, loaded):
            flag = option_name(name)
            fact = f"{flag} does not apply to {args.source}: its program defines it"
            raise UsageError(fact, hint=f"leave out {flag}", fields=[name])
    if source.timeline is not None:
        return StudioState(run=True, options=options), source
    if colon and path.endswith(".py"):
        state = StudioState(code=read_text(path), function=function, options=DEFAULTS | options)
        return state, None
    if args.source.endswith(".sched"):
        return StudioState(program=read_text(args.source), options=DEFAULTS | options), None
    return StudioState(args.source, options=DEFAULTS | options), None


def read_options(words: list[str]) -> dict[str, str]:
    """Return name -> text of the options on the command line that a state can have.

    Args:
        words: The words of the command line, which the parser has already accepted.
    """
    from schedir.commands.common.program_options import PROGRAM_OPTIONS
    from schedir.commands.studio.state import PREDICTION_OPTIONS

    options, remaining = dict[str, str](), iter(words)
    for word in remaining:
        if word.startswith("-O"):
            name, equals, text = (word[2:] or next(remaining)).partition("=")
            options[name.strip().replace("-", "_")] = text if equals else "yes"
        elif word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in PROGRAM_OPTIONS or name in PREDICTION_OPTIONS:
                options[name] = text if equals else next(remaining)
    return options
