"""Compare the arguments of a pipeline's processes, and raise one error in all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from schedir import errors
from schedir.errors import InstructionSite, SchedirError, UsageError, describe
from schedir.transports.json_collectives import RecordTypes, encode_value, gather

_T = TypeVar("_T")


def gather_or_raise(
    make_value: Callable[[], _T], group: Any, record_types: RecordTypes = ()
) -> list[_T]:
    """Return the results of `make_value` in all processes of the group, in the order of ranks.

    If some processes raise a SchedirError, all processes raise the error of the lowest of these
    ranks. The message names this rank, except if all processes raise the same error. All processes
    of the group must call this.

    Args:
        make_value: Returns the value of this process: a plain value, or an instance of one of
            `record_types`.
        group: The process group.
        record_types: The record types that values may have.

    Raises:
        SchedirError: `make_value` of a process raised this error.
        UsageError: `make_value` of a process returned a value that cannot be sent.
    """
    value: _T | None = None
    error: SchedirError | None = None
    try:
        value = make_value()
        encode_value(value, record_types)
    except SchedirError as raised_error:
        error, value = raised_error, None
    except TypeError as raised_error:
        error, value = UsageError(str(raised_error)), None
    results = gather(
        (value, error and _error_to_values(error)), group, [*record_types, InstructionSite]
    )
    refusals = [
        (rank, _error_from_values(error_values))
        for rank, (_, error_values) in enumerate(results)
        if error_values
    ]
    if refusals:
        rank, first_error = refusals[0]
        if len({refusal.fact for _, refusal in refusals}) > 1 or len(refusals) < len(results):
            first_error.fact = f"rank {rank}: {first_error.fact}"
            raise first_error
        raise error or first_error
    return [result for result, _ in results]


def _error_to_values(error: SchedirError) -> tuple[Any, ...]:
    """Return an error as plain values.

    If the class of the error has more fields than SchedirError, `fact` becomes the complete
    message.
    """
    sites = [InstructionSite(s.rank, s.index, str(s.instr), s.note) for s in error.sites]
    fact = error.fact
    if not _has_plain_fields(type(error)):
        fact, sites = "\n  ".join([fact, *error.format_lines()]), []
    return type(error).__name__, fact, error.program, sites, error.hint, [*error.fields]


def _has_plain_fields(error_type: Any) -> bool:
    """Return whether errors of a type have only the fields of `SchedirError`."""
    is_error = isinstance(error_type, type) and issubclass(error_type, SchedirError)
    return is_error and getattr(error_type, "__init__") is getattr(SchedirError, "__init__")  # noqa: B009


def _error_from_values(values: tuple[Any, ...]) -> SchedirError:
    """Return the error that another process sent.

    The returned error has the class of the original error, or SchedirError if that class has more
    fields than SchedirError.
    """
    name, fact, program, sites, hint, fields = values
    error_type: Any = getattr(errors, str(name), None)
    kind: type[SchedirError] = error_type if _has_plain_fields(error_type) else SchedirError
    error: SchedirError = kind(fact, program=program, sites=sites, hint=hint, fields=fields)
    return error


def require_same(name: str, values: Sequence[object], hint: str = "") -> None:
    """Refuse values that differ between ranks.

    Args:
        name: The name of the value, for the error.
        values: The value of each rank.
        hint: A hint for the error.

    Raises:
        UsageError: Two ranks have different values.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            first_text, other_text = (
                v if isinstance(v, str) else describe(v) for v in (values[0], value)
            )
            raise UsageError(
                f"{name} is {first_text} on rank 0, but {other_text} on rank {rank}", hint=hint
            )
