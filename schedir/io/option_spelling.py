"""The spelling of the fields of a program on the command line: `--ranks 4`, `-O zero=3`."""

from __future__ import annotations

from typing import Final

# Fields that have their own option. All other fields are given as `-O NAME=VALUE`.
FIELDS_WITH_FLAGS: Final = ("ranks", "microbatches", "stages_per_rank", "placement")


def option_words(name: str, value: str = "") -> list[str]:
    """Return the command-line words that set a field of a program.

    Args:
        name: The field, such as `"stages_per_rank"` or `"zero"`.
        value: The value as text. `""` and `"yes"` switch a field on.

    Returns:
        One or two words.

    Example:
        >>> option_words("stages_per_rank", "2"), option_words("zero", "3"), option_words("overlap")
        (['--stages-per-rank', '2'], ['-O', 'zero=3'], ['-O', 'overlap'])
    """
    if name in FIELDS_WITH_FLAGS:
        return ["--" + name.replace("_", "-"), *([value] if value else [])]
    return ["-O", name if value in ("", "yes") else f"{name}={value}"]


def option_name(name: str) -> str:
    """Return the name that errors use for a field on the command line: `--ranks`, `-O zero`.

    Args:
        name: The field, such as `"ranks"` or `"zero"`.
    """
    return " ".join(option_words(name))
