"""Generate the page of the command line from the parsers of all commands."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import schedir.__main__
from docs.pages import ROOT, define_page, format_table, run_command
from schedir.commands import COMMANDS, import_command

MORE = re.compile(r"^The page (?:docs/)?(\S+\.md) has .*\.$", re.MULTILINE)


class Option(NamedTuple):
    """An option or a positional argument. Equal options of several commands are one option."""

    flags: str
    meaning: str


def build_command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command and subcommand, by name."""
    parsers: dict[str, argparse.ArgumentParser] = {}
    for command in COMMANDS:
        parser = schedir.__main__._build_parser([command]).command_parser
        assert parser is not None
        subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if subparsers:
            parsers |= {
                f"{command} {name}": subparser for name, subparser in subparsers[0].choices.items()
            }
        else:
            parsers[command] = parser
    return parsers


def format_cell(text: str) -> str:
    """Return a text as the content of a Markdown table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def read_option(parser: argparse.ArgumentParser, action: argparse.Action) -> Option:
    """Return the flags of an action as a user types them, and its help."""
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    is_switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
    words = ", ".join(action.option_strings) + ("" if is_switch else f" {value}")
    meaning = parser._get_formatter()._expand_help(action) if action.help else ""
    return Option(f"`{format_cell(words)}`", format_cell(meaning))


def list_groups(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, list[tuple[argparse.Action, Option]]]]:
    """Yield the title of each group of options, and its options without those that help hides."""
    for group in parser._action_groups:
        options = [
            (action, read_option(parser, action))
            for action in group._group_actions
            if action.help != argparse.SUPPRESS
        ]
        if options:
            yield str(group.title), options


def list_options(parser: argparse.ArgumentParser) -> list[Option]:
    """Return all options of a parser."""
    return [option for _, options in list_groups(parser) for _, option in options]


class Shared(NamedTuple):
    """Options that several commands have.

    Attributes:
        everywhere: Options of all commands.
        program: Options that set how a schedule is compiled.
        other: Other options, with the commands that have them.
    """

    everywhere: list[Option]
    program: list[Option]
    other: dict[Option, list[str]]


def find_shared(parsers: dict[str, argparse.ArgumentParser]) -> Shared:
    """Return the options that several commands have."""
    commands: dict[Option, list[str]] = {}
    for name, parser in parsers.items():
        for option in list_options(parser):
            commands.setdefault(option, []).append(name)
    everywhere = [
        option
        for option in list_options(parsers["options"])
        if all(option in commands and (n in commands[option] or " " in n) for n in parsers)
    ]
    shared = {option: names for option, names in commands.items() if len(names) > 1}
    program = [
        option
        for option in list_options(parsers["compile"])
        if option in list_options(parsers["explain"])
        and option not in everywhere
        and option.flags.startswith("`-")
    ]
    other_options = {o: n for o, n in shared.items() if o not in everywhere and o not in program}
    return Shared(everywhere, program, other_options)


def describe_command(name: str, parser: argparse.ArgumentParser, shared: Shared) -> Iterator[str]:
    """Yield the blocks of the section of a command."""
    about = f"{format_cell(str(parser.description)).rstrip('.')}."
    examples = getattr(import_command(name.split()[0]), "EXAMPLES", "")
    more_link = MORE.search(examples)
    more = f" More: [{read_title(more_link[1])}]({make_link(more_link[1])})." if more_link else ""
    settings = " Settings: [Configuration](configuration.md)." * (name == "train")
    positionals = [
        f"[{value}]" if a.nargs == "?" else f"{value}{' ...' * (a.nargs in ('+', '*'))}"
        for a in parser._get_positional_actions()
        for value in [a.metavar or a.dest.upper()]
    ]
    usage = f" Usage: `schedir {' '.join([name, *positionals])} [OPTION ...]`."
    text = inspect.cleandoc("\n" + MORE.sub("", examples)).strip()
    first = text.partition("\n")[0]
    has_notes = "   " in text
    example = f" Example: `{first}`." * (not has_notes and first not in ("", f"schedir {name}"))
    shared_options = list_shared_options(parser, shared)
    details = f"{usage}{example}{shared_options}{more}{settings}"
    yield f"### schedir {name}\n\n{about[0].upper()}{about[1:]}{details}"
    if has_notes:
        yield f"```text\n{text}\n```"
    common = {*shared.everywhere, *shared.program, *shared.other}
    rows: list[list[str]] = []
    for title, options in list_groups(parser):
        new_options = [list(option) for _, option in options if option not in common]
        has_title = title not in ("positional arguments", "options")
        rows += [[f"*{format_cell(title)}*", ""]] * (has_title and bool(new_options))
        rows += new_options
    if rows:
        yield format_table(["option", "meaning"], rows)


def list_shared_options(parser: argparse.ArgumentParser, shared: Shared) -> str:
    """Return a sentence with the shared options of a command, or "" if it has none."""
    all_options = list_options(parser)
    shared_options = [option.flags for option in all_options if option in shared.other]
    programs = [option.flags for option in all_options if option in shared.program]
    if len(programs) == len(shared.program):
        programs = ["all [program options](#program-options)"]
    flags = ", ".join([*shared_options, *programs])
    return f" Shared options: {flags}." if flags else ""


def make_link(path: str) -> str:
    """Return a link to a page that the help of a command mentions."""
    if path.startswith("reference/"):
        return path.removeprefix("reference/")
    return f"../{path}" if (ROOT / "docs" / path).is_file() else f"../../{path}"


def read_title(path: str) -> str:
    """Return the title of a page."""
    file = Path(ROOT / "docs" / "reference" / make_link(path))
    heading = re.search(r"^# (.*)$", file.read_text(), re.MULTILINE)
    return heading[1] if heading else path


def build_blocks() -> dict[str, str]:
    """Return the tables of commands, shared options, options of `compile` and exit codes."""
    parsers = build_command_parsers()
    shared = find_shared(parsers)
    option_facts = json.loads(run_command("schedir options --json"))
    options = [
        [f"`{format_cell(row['option'])}`",
         f"`{row['configuration']}`" if row["configuration"] else "-",
         format_cell(row["help"])]
        for row in option_facts.values()
        if row["option"].startswith("-O")
    ]  # fmt: skip
    sections = [
        "\n\n".join(describe_command(name, parser, shared)) for name, parser in parsers.items()
    ]
    commands = [
        [
            f"[`schedir {name}`](#schedir-{name.replace(' ', '-')})",
            format_cell(COMMANDS.get(name) or str(parser.description)),
        ]
        for name, parser in parsers.items()
    ]
    codes = re.findall(r"^- (\d+): (.*)$", str(schedir.__main__.__doc__), re.MULTILINE)
    return {
        "commands": format_table(["command", "description"], commands),
        "program": format_table(
            ["option", "meaning"], [list(row_option) for row_option in shared.program]
        ),
        "shared": format_table(
            ["option", "meaning"],
            [
                list(option)
                for option in (*shared.everywhere, *shared.other)
                if "--help" not in option.flags
            ],
        ),
        "options": format_table(["option", "configuration", "meaning"], options),
        "sections": "\n\n".join(sections),
        "codes": format_table(["exit code", "meaning"], [list(row) for row in codes]),
    }


PAGES = define_page("reference/command-line", build_blocks)
