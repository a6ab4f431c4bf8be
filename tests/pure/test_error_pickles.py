"""Tests that each error keeps its class, attributes and text when it is pickled or copied."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from schedir import errors
from schedir.commands.studio.state import CodeError
from schedir.errors import CommandHint, CycleWait, InstructionSite, SchedirError
from schedir.extras import MissingPackageError
from schedir.ir.isa.instructions import Instr, Opcode

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers(0, 2**40)
INSTRUCTIONS = st.one_of(TEXTS, st.builds(Instr, st.sampled_from(Opcode), NUMBERS, NUMBERS))
SITES = st.lists(st.builds(InstructionSite, NUMBERS, NUMBERS, INSTRUCTIONS, TEXTS), max_size=3)
WAITS = st.builds(
    CycleWait, NUMBERS, NUMBERS, INSTRUCTIONS, INSTRUCTIONS, NUMBERS, NUMBERS, NUMBERS
)
# The values of each argument of a class of errors.
ARGUMENTS: dict[str, st.SearchStrategy[object]] = {
    "fact": TEXTS,
    "program": TEXTS,
    "sites": SITES,
    "site": st.builds(InstructionSite, NUMBERS, NUMBERS, INSTRUCTIONS),
    "window": SITES,
    "hint": st.one_of(TEXTS, st.builds(CommandHint, TEXTS, TEXTS)),
    "fields": st.lists(TEXTS, max_size=3),
    "location": TEXTS,
    "line": NUMBERS,
    "column": st.integers(1, 99),
    "text": TEXTS,
    "step": NUMBERS,
    "file": TEXTS,
    "limit_bytes": st.floats(0, 1e15),
    "required_bytes": st.floats(0, 1e15),
    "live_values": st.lists(st.tuples(TEXTS, NUMBERS, st.floats(0, 1e15)), max_size=3),
    "tier": st.sampled_from(["device", "host", "disk"]),
    "progress_model": TEXTS,
    "cycle": st.lists(WAITS, min_size=1, max_size=3),
    "executed_count": NUMBERS,
    "instruction_count": NUMBERS,
    "rank": NUMBERS,
    "replicas": st.tuples(NUMBERS, NUMBERS),
    "process": NUMBERS,
}


def list_error_classes() -> list[type[SchedirError]]:
    """Return all classes of errors in `schedir.errors`, and their subclasses in other modules."""
    classes = [c for c in vars(errors).values() if inspect.isclass(c)]
    return [c for c in classes if issubclass(c, SchedirError)] + [CodeError, MissingPackageError]


def list_copies(error: SchedirError) -> Iterator[object]:
    """Yield all copies and pickles of an error."""
    yield copy.copy(error)
    yield copy.deepcopy(error)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(error, protocol))


@given(st.fixed_dictionaries(ARGUMENTS), TEXTS)
@settings(max_examples=30)
def test_pickled_error_is_equal(arguments: dict[str, Any], note: str) -> None:
    for error_class in list_error_classes():
        parameters = inspect.signature(error_class).parameters
        error = error_class(**{name: arguments[name] for name in parameters})
        error.add_note(note)
        for other in list_copies(error):
            assert isinstance(other, SchedirError)
            assert type(other) is error_class
            assert (vars(other), other.args) == (vars(error), error.args)
            assert str(other) == str(error)


def test_pickled_error_keeps_attributes_that_were_set_later() -> None:
    missing = MissingPackageError("no torch")
    missing.name = "torch"
    wait = CycleWait(0, 1, "a", "b", 1, 2, 3)
    deadlock = errors.DeadlockError(
        "2 ranks wait", progress_model="per_pair", cycle=[wait], executed_count=1,
        instruction_count=2, hint=CommandHint("zero=3", "-O zero=3"),
    )  # fmt: skip
    deadlock.eager_limit = 65536.0
    for one in list_copies(missing):
        assert getattr(one, "name") == "torch"  # noqa: B009
    for other in list_copies(deadlock):
        assert isinstance(other, errors.DeadlockError)
        assert other.eager_limit == 65536.0
        assert isinstance(other.hint, CommandHint)
        assert other.hint.command == "-O zero=3"
