"""The spelling of the fields of a program on the command line: `--ranks 4`, and `-O zero=3`."""

from __future__ import annotations

from typing import Final

# Fields with an option of their own.  All others are given as `-O NAME=VALUE`.
FIELDS_WITH_FLAGS: Final = ("ranks", "microbatches", "stages_per_rank", "placement")


def option_words(name: str, value: str = "") -> list[str]:
    """Return the command-line words that give a field of a program.

    Args:
        name: The field, such as `"stages_per_rank"` or `"zero"`.
        value: Its value as text; `""` or `"yes"` for a field that is on.

    Example:
        >>> option_words("stages_per_rank", "2"), option_words("zero", "3"), option_words("overlap")
        (['--stages-per-rank', '2'], ['-O', 'zero=3'], ['-O', 'overlap'])
    """
    if name in FIELDS_WITH_FLAGS:
        return ["--" + name.replace("_", "-"), *([value] if value else [])]
    return ["-O", name if value in ("", "yes") else f"{name}={value}"]


def option_name(name: str) -> str:
    """Return a field as an error names it on the command line: `--ranks`, `-O zero`."""
    return " ".join(option_words(name))
