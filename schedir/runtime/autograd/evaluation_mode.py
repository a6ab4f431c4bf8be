"""Run a program between steps without changing the state of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from schedir.errors import ModelError
from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksums, get_write_traces
from schedir.runtime.program_state import ProgramService, ProgramState


@contextmanager
def evaluation_mode(state: ProgramState) -> Iterator[None]:
    """Switch the modules of a rank to evaluation mode within a context.

    At the end, the context restores the modes and buffers of the modules, and torch's generators.
    Evaluations and steps draw different random numbers.

    Args:
        state: The state of the program that evaluates. If its loss is a module, the loss is
            switched, too.

    Raises:
        ModelError: A forward wrote to a Parameter.
    """
    modules = state.list_modules()
    names = {p: name for module in modules for name, p in module.named_parameters()}
    # Exclude sharded parameters: their values are gathered into other memory, and
    # `ShardedParameters` checks this memory.
    excluded_parameters = {p for stage in state.stages.values() for p in stage.parameter_shards}
    other_parameters = [p for p in names if p not in excluded_parameters]
    compared_parameters = (
        [*names] if state.device.type == "cpu" and state.service(_Evaluations).is_first else []
    )
    before = [*get_write_traces(other_parameters), *compute_checksums(compared_parameters)]
    state.service(_Evaluations).is_first = False
    with PreservedState() as preserved:
        preserved.add_fields(state, "is_evaluating")
        state.is_evaluating = True
        for module in modules:
            preserved.add_buffers(module)
            preserved.add_modes(module)
            module.eval()
        preserved.enter_context(state.random_streams.preserve_generators(always=True))
        yield
    after = [*get_write_traces(other_parameters), *compute_checksums(compared_parameters)]
    for p, old_trace, new_trace in zip(
        [*other_parameters, *compared_parameters], before, after, strict=True
    ):
        if old_trace != new_trace:
            raise ModelError(
                f"a forward writes to Parameter {names[p]} in an evaluation",
                program=state.program.name,
                hint="make it a buffer, which schedir restores, or write in training mode only",
            )


class _Evaluations(ProgramService):
    """Has an attribute `is_first` that is True until the first evaluation of the program."""

    is_first = True
