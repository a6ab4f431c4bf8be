"""Parse selections such as "all", "half", "fit", stages, or pairs of stage and microbatch.

"half" selects every other microbatch of each stage. "fit" selects only as many microbatches as the
memory limit requires. "none" selects nothing, and "full" means "all". Parallel plans use these two
words. A selection can also be a function of stage and microbatch that returns a boolean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CommandHint, UsageError, describe
from schedir.ir.cost.number_parsing import parse_integer
from schedir.ir.pipeline.field_schema import FieldType
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import STAGE_SHIFT, Words

Selection = str | Iterable[int] | Iterable[tuple[int, int]] | Callable[[int, int], bool]

SELECTION_KEYWORDS: Final = ("all", "full", "half", "fit", "none")
_ALLOWED_SELECTIONS: Final = (
    '"all", "half", "fit", "none", stages like [0, 1], pairs like [(0, 3)], or a function of '
    "(stage, mb)"
)


def is_fit(selection: object) -> bool:
    """Return whether a selection is "fit", so that a memory limit determines what is selected.

    Args:
        selection: The selection.
    """
    return isinstance(selection, str) and selection == "fit"


def is_keyword(selection: object) -> bool:
    """Return whether a selection is a keyword, not a list of stages or microbatches.

    Args:
        selection: The selection.
    """
    return isinstance(selection, str) and selection in SELECTION_KEYWORDS


def select_addresses(
    selection: Selection, option: str, addresses: Words, shape: PipelineShape
) -> NDArray[np.bool_]:
    """Return a mask of the addresses, (stage, microbatch) pairs, that an option selects.

    Args:
        selection: The selection; not "fit".
        option: The name of the option, for errors.
        addresses: The addresses that can be selected, as words for `split_addresses`, shape (k,).
        shape: The pipeline shape.

    Returns:
        A mask of shape (k,).

    Raises:
        UsageError: The selection has a wrong form, or a stage or microbatch does not exist.
    """
    stage, mb = split_addresses(addresses)
    if callable(selection):
        pairs = zip(stage.tolist(), mb.tolist(), strict=True)
        return np.array([bool(selection(*pair)) for pair in pairs], bool)
    if isinstance(selection, str):
        if selection in ("all", "full", "none"):
            return np.full(len(addresses), selection != "none")
        if selection == "half":
            return np.asarray(mb % 2 == 0)
    named_pairs = find_named_pairs(selection, option, shape)
    pairs = zip(stage.tolist(), mb.tolist(), strict=True)
    return np.array([(s,) in named_pairs or (s, m) in named_pairs for s, m in pairs], bool)


def find_named_pairs(
    selection: Selection, option: str, shape: PipelineShape
) -> set[tuple[int, ...]]:
    """Return the stages and the (stage, microbatch) pairs that a selection lists.

    Args:
        selection: The selection; not a keyword or a function.
        option: The name of the option, for errors.
        shape: The pipeline shape.

    Returns:
        A set of tuples (stage,) and (stage, microbatch).

    Raises:
        UsageError: The selection has a wrong form, or a stage or microbatch does not exist.
    """
    if isinstance(selection, bytes):
        raise _make_selection_error(selection, option)
    if isinstance(selection, str):
        try:
            selection = parse_selection(selection)
        except ValueError:
            raise _make_selection_error(selection, option) from None
        assert not isinstance(selection, str)
    try:
        named_pairs = {
            (*map(_require_integer, entry),)
            if isinstance(entry, tuple | list)
            else (_require_integer(entry),)
            for entry in selection  # type: ignore[union-attr]
        }
    except (TypeError, ValueError):
        raise _make_selection_error(selection, option) from None
    for entry in named_pairs:
        if len(entry) not in (1, 2):
            raise _make_selection_error(selection, option)
        limits = (("stage", shape.stages), ("microbatch", shape.microbatches))
        for number, (unit, count) in zip(entry, limits, strict=False):
            if not 0 <= number < count:
                raise UsageError(
                    f"{option} selects {unit} {number}, but the last {unit} is {count - 1}",
                    fields=[option],
                )
    return named_pairs


def _require_integer(value: Any) -> int:
    """Return an integer. Raise TypeError for any other type, and for a boolean."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def split_addresses(addresses: Words) -> tuple[Words, Words]:
    """Return the stage and the microbatch of each address.

    Args:
        addresses: Addresses, or words with other bits, which are ignored.
    """
    return addresses >> STAGE_SHIFT & 0xFFFF, addresses & 0xFFFFFFFF


def _make_selection_error(selection: object, option: str) -> UsageError:
    return UsageError(
        f"{option} must be {_ALLOWED_SELECTIONS}, not {describe(selection)}", fields=[option]
    )


def missing_limit_error(option: str, sizes: object, limit_name: str, limit: object) -> UsageError:
    """Return the error for "fit" without sizes, without a limit, or without both.

    Args:
        option: The option with the value "fit".
        sizes: The sizes of values, or None.
        limit_name: The option with the limit in bytes: "memory_limit" or "host_memory_limit".
        limit: The limit, or None.
    """
    examples = {
        "sizes": (
            "--sizes activation=16MB,saved=1.2GB",
            "sizes=Sizes(activation=16e6, saved=1.2e9)",
        ),
        "memory_limit": ("--memory-limit 40GB", "memory_limit=40e9"),
        "host_memory_limit": ("-O host_memory_limit=40GB", "host_memory_limit=40e9"),
    }
    missing = [name for name, value in (("sizes", sizes), (limit_name, limit)) if value is None]
    flags = " ".join(examples[name][0] for name in missing)
    arguments = ", ".join(examples[name][1] for name in missing)
    return UsageError(
        f'{option}="fit" needs {" and ".join(missing)}',
        hint=CommandHint(arguments, flags),
        fields=[option],
    )


def parse_selection(text: str) -> Any:
    """Parse the text of a selection: `all`, `half`, `fit`, or a list such as `0,1.3`.

    In a list, `0` is a stage, and `1.3` is microbatch 3 of stage 1.

    Args:
        text: The text.

    Returns:
        The keyword, or a tuple of stages and (stage, microbatch) pairs.

    Raises:
        ValueError: The text is not a selection.
    """
    if text in SELECTION_KEYWORDS:
        return text
    entries: list[Any] = []
    for part in text.split(","):
        try:
            numbers = tuple(map(parse_integer, part.split(".")))
        except ValueError:
            numbers = ()
        if len(numbers) not in (1, 2):
            raise ValueError(
                f"must be all, half, fit, none, or stages like 0,1 or 0.3,0.4, not {text!r}"
            )
        entries.append(numbers if len(numbers) == 2 else numbers[0])
    return tuple(entries)


def make_selection_type(requirement: str) -> FieldType:
    """Return the field type of an option that takes a selection.

    Args:
        requirement: Text for errors with the purpose of the option.
    """
    return FieldType(requirement, parse_selection, str, metavar="WHAT", argument_type="Selection")
