"""The command `train`: train a model from a configuration file."""

from __future__ import annotations

import argparse
import re
from shutil import get_terminal_size
from textwrap import wrap

from schedir.extras import require_package

EXAMPLES = """\
  schedir train examples/demo.toml
  schedir train run.toml --set train.steps=100 --set pipeline.schedule=zb_h1

The page docs/how-to/train-from-a-configuration.md has more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train`.

    Args:
        parser: The parser of the command.
    """
    parser.add_argument(
        "config", metavar="CONFIG.toml",
        help="a TOML file with settings; if its schedule is file.py:function, schedir "
        "executes file.py, unless --no-code is given",
    )  # fmt: skip
    parser.add_argument(
        "--trace", metavar="DIR", help="write the timeline of the last step to this folder"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        type=_require_assignment,
                        help="replace a setting of the file, such as pipeline.ranks=2")  # fmt: skip


def _require_assignment(text: str) -> str:
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} has no value: --set {text}=VALUE")
    return text


def format_epilog() -> str:
    """Return the settings by section, for `--help`."""
    from schedir.training.config.settings_table import format_heading, list_settings

    width = get_terminal_size().columns - 2  # The width that argparse uses.
    lines = ["\nsettings, their values, their defaults and their meanings:"]
    for section, (_, settings) in list_settings().items():
        lines.append(f"\n{format_heading(section)}")
        for name, value_type, default, meaning in settings:
            lines.append(f"  {name:<16}  {value_type:<52}  {default}".rstrip())
            for text in re.split(r"\n\s*(?=- )", meaning.replace("`", "")):
                text = " ".join(text.split())
                lines += wrap(text[:1].upper() + text[1:], width, initial_indent=" " * 6,
                              subsequent_indent=" " * 6, break_on_hyphens=False)  # fmt: skip
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> int:
    """Train the model of a configuration, and return the exit code.

    Args:
        args: The parsed options of `train`.

    Raises:
        SchedirError: torch is missing, or the configuration is invalid.
    """
    import json

    require_package("torch", "schedir train")
    from schedir.training.train import run

    traced = [] if args.trace is None else [f"output.trace={json.dumps(args.trace)}"]
    return run(args.config, [*args.settings, *traced])
