"""Tests that the Python of pages runs, and that commands print what the pages show."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

import schedir
from docs.pages import DRAWS, PRINTED
from schedir.__main__ import main
from tests.tutorial import READERS, ROOT, read_blocks, read_steps


def commands(page: str) -> list[str]:
    """Return the commands that a page shows without their output."""
    shell = [body for language, body in read_blocks(page) if not language and body[:2] != "# "]
    lines = "".join(shell).replace("\\\n", "").splitlines()
    return [line for line in lines if line.startswith("schedir ")]


def list_generator_commands() -> set[tuple[str, ...]]:
    """Return the commands that `test_generated_page_is_current` runs and that write no other file.

    They print blocks of pages, or draw pictures that a page shows.
    """
    found: set[tuple[str, ...]] = set()
    for template in (ROOT / "docs" / "templates").glob("*.md.in"):
        text = template.read_text().replace(" \\\n    ", " ")
        draws = [match[0] for match in DRAWS.finditer(text) if f"images/{match[1]}" in text]
        prints = [command for command in PRINTED.findall(text) if " -o " not in command]
        found |= {tuple(shlex.split(command)) for command in (*draws, *prints)}
    return found


GENERATOR_COMMANDS = list_generator_commands()


def run_shell_command(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command as a shell does, and return its exit code and output."""
    program, *arguments = shlex.split(command, comments=True)
    if program == "python":
        runpy.run_path(arguments[0], run_name="__main__")
        return 0, "".join(capsys.readouterr())
    for k, word in enumerate(arguments):
        if word.startswith("$("):  # a shell inserts the standard output of this command
            assert main(shlex.split(word[2:-1])[1:]) == 0
            arguments[k] = capsys.readouterr().out.strip()
    return main(arguments), "".join(capsys.readouterr())


def is_run_by_generator(command: str) -> bool:
    return tuple(shlex.split(command, comments=True)) in GENERATOR_COMMANDS


@pytest.mark.parametrize("name", READERS)
def test_page_commands_print_documented_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("examples").symlink_to(ROOT / "examples")
    program = schedir.compile(schedir.schedules.one_f_one_b, schedir.PipelineShape(4, 8))
    schedir.save_timeline(schedir.simulate(program), "run.timeline")  # a file that the pages use
    num_commands = 0
    for step in read_steps(page):
        if step.kind == "file":
            Path(step.named).write_text(step.text)
        elif (
            step.kind == "python" and not step.needs_torch and name != "how-to/run-in-torch"
        ):  # tests/cpu runs the others
            exec(compile(step.text, name, "exec"), {})
            capsys.readouterr()  # pages describe the output in words
            num_commands += 1
        elif step.kind == "command" and not step.text.startswith("schedir train"):
            num_commands += 1
            if is_run_by_generator(step.text):
                continue
            code, out = run_shell_command(step.text, capsys)
            assert code == (2 if "Error: " in step.prints else 0), step.text
            pattern = ".*".join(map(re.escape, step.prints.split("...\n")))
            assert re.fullmatch(pattern, out, flags=re.S), (step.text, out)
    for command in commands(page):
        if not command.startswith("schedir train"):  # tests/cpu trains
            num_commands += 1
            assert is_run_by_generator(command) or run_shell_command(command, capsys)[0] == 0
    assert num_commands or name in ("how-to/write-a-schedule", "how-to/train-from-a-configuration")


def test_commands_named_on_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Commands and options exist, in blocks and in sentences, and Python blocks are valid."""
    helps: dict[str, str] = {}
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for path in pages:
        page = path.read_text().replace("\\\n", "")
        shell = "".join(
            body for language, body in read_blocks(page) if language in ("", "sh", "bash")
        )
        commands = re.findall(r"^(?:\$ )?schedir +([a-z]+) (.*)$", shell, flags=re.M)
        commands += re.findall(r"`schedir ([a-z]+) ?([^`]*)`", page)
        for command, arguments in commands:
            # A command may have subcommands.
            command_words = [
                command,
                *re.findall(r"^(?:inspect|export)\b", arguments),
            ]
            if (called := " ".join(command_words)) not in helps:
                assert main([*command_words, "--help"]) == 0, (path.name, called)
                helps[called] = capsys.readouterr().out
            for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", arguments.split("  #")[0]):
                known = re.search(rf"(?<!\S){option}(?![\w-])", helps[called].replace("[", " "))
                assert known, (path.name, command, option)
        for language, body in read_blocks(page):
            if language == "python":
                compile(body, path.name, "exec")
