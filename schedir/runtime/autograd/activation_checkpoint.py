"""Recompute activations: save the inputs of a forward, and run the forward twice.

The second run, before the backward, must compute the same values as the first. So the second run
uses the same weight version, the same seed of random numbers, and the same keyword arguments. A
forward may change three other things:

- buffers, such as running statistics,
- parameters that are not trained, such as a moving average of other parameters,
- the states of random generators, if the executor has no seed.

This module saves the values that the first run used, and restores them for the second run. Then it
undoes the changes of the second run, because the first run has already made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.ir.isa.instructions import Instr
from schedir.runtime.model_checks.tensor_fingerprint import (
    compute_checksum,
    compute_checksums,
    get_versions,
    get_write_traces,
    has_same_bits,
)
from schedir.runtime.program_state import ProgramState

_TensorTable = dict[str, Any]  # `_buffers` or `_parameters` of a module
_ForwardResult = tuple[Sequence[Tensor], Sequence[Tensor]]  # outputs, leaves of the graph


class Checkpoint(NamedTuple):
    """The saved inputs of a forward, and the state that the forward used.

    Attributes:
        inputs: The inputs of the stage for a microbatch.
        buffers: Buffers and untrained parameters that forwards of the stage change. Each entry has
            the dict `_buffers` or `_parameters` of a module, the key of the tensor in this dict,
            and its value before the forward.
        generator_states: The states of torch's default generators before the forward. The sequence
            is empty if the executor has a seed.
        output_checksums: A checksum of each output. On a GPU the sequence is empty, except in debug
            mode.
        input_versions: The version counters of the inputs. The sequence is empty after the first
            step, and after the inputs were offloaded.
    """

    inputs: Sequence[Tensor]
    buffers: Sequence[tuple[_TensorTable, str, Tensor]]
    generator_states: Sequence[Tensor]
    output_checksums: Sequence[int]
    input_versions: Sequence[int]

    def require_unwritten(self, stage: int, mb: int) -> None:
        """Check that no input was written to since the first forward.

        Args:
            stage: The number of the stage, for the error.
            mb: The microbatch, for the error.

        Raises:
            ModelError: An input was written to.
        """
        if self.input_versions and self.input_versions != get_versions(self.inputs):
            raise ModelError(
                f"the input of stage {stage} for microbatch {mb} was written to before the stage "
                "was recomputed",
                hint="return a new tensor from the previous stage: self.buffer.clone()",
            )


class Checkpoints:
    """Runs the forward of a stage for a microbatch, and runs the forward again later.

    Args:
        state: The state of the rank.
        i: The Forward or the Recompute of the stage and the microbatch.
    """

    def __init__(self, state: ProgramState, i: Instr) -> None:
        self.state = state
        self.stage = i.stage
        self.mb = i.mb
        self.module = state.stages[i.stage].module
        self.written_buffers = state.stages[i.stage].written_buffers
        self.checked_modes = state.stages[i.stage].checked_recompute_modes
        self.is_last_stage = i.stage == state.shape.stages - 1
        modules = [self.module]
        if self.is_last_stage:
            modules += state.options.loss_modules
        tables: list[tuple[str, _TensorTable]] = [
            (path, table)
            for root in modules
            for path, module in root.named_modules()
            for table in (module._buffers, module._parameters)
        ]
        self.named_entries = [
            (f"{path}.{name}" if path else name, table, name)
            for path, table in tables
            for name in table
        ]

    def run_first_forward(
        self, run: Callable[[], _ForwardResult], inputs: Sequence[Tensor]
    ) -> tuple[_ForwardResult, Checkpoint]:
        """Run a forward so that autograd saves no tensors, and create its checkpoint.

        The first forward of a stage in training mode, and the first in evaluation mode, record the
        names of the buffers and untrained parameters that they write to or replace. Later forwards
        copy only these tensors.

        Args:
            run: A function that runs the module and the loss on `inputs`.
            inputs: The inputs of the stage.

        Returns:
            The result of `run`, and the checkpoint for `recompute`.

        Raises:
            ModelError: The loss changes its target in place. Or the forward runs a backward, or
                writes to a buffer that the first forward of the stage did not change.
        """
        entries: list[tuple[str, _TensorTable, str, Tensor]] = [
            (full_name, table, name, tensor)
            for full_name, table, name in self.named_entries
            if (tensor := table.get(name)) is not None and _may_be_written(tensor)
        ]
        known_names = self.written_buffers.get(self.module.training)
        values = _copy_tensors(
            [
                (tensor, known_names is None or full_name in known_names, known_names is None)
                for full_name, _, _, tensor in entries
            ]
        )
        traces = get_write_traces([tensor for *_, tensor in entries])
        generator_states = self._get_generator_states()
        target_versions = self._get_target_versions()
        input_versions = get_versions(inputs) if self.state.first_step_checks.is_active else ()
        # Keep torch's gradient mode on, because some kernels round differently without it.
        with saved_tensors_hooks(_discard_saved_tensor, self._refuse_backward):
            result = run()
        if self._get_target_versions() != target_versions:
            raise ModelError(
                f"the loss changes the target of microbatch {self.mb} in place, but the "
                "recomputation of the last stage needs the original target",
                hint="begin the loss with target = target.clone()",
            )
        new_traces = get_write_traces([tensor for *_, tensor in entries])
        is_written = [x != y for x, y in zip(traces, new_traces, strict=True)]
        is_replaced = [table.get(name) is not tensor for _, table, name, tensor in entries]
        rows = [*zip(entries, values, is_written, is_replaced, strict=True)]
        if known_names is None:
            known_names = self.written_buffers[self.module.training] = {
                full_name
                for (full_name, _, _, tensor), value, written, replaced in rows
                if written or replaced or not has_same_bits(tensor.detach().to(value.device), value)
            }
        buffers = []
        for (full_name, table, name, tensor), value, written, replaced in rows:
            if written and full_name not in known_names:
                raise ModelError(
                    f"stage {self.stage} writes to its {_describe_kind(tensor)} {full_name}, but "
                    "its first forward did not: recomputation needs the old value",
                    hint="write to it in every forward, or assign a new tensor to it",
                )
            if replaced or full_name in known_names:
                buffers.append((table, name, _match_tensor_type(value, tensor)))
        checksums = self._checksum_outputs(result[0])
        return result, Checkpoint(inputs, buffers, generator_states, checksums, input_versions)

    def recompute(
        self, run: Callable[[], _ForwardResult], checkpoint: Checkpoint
    ) -> _ForwardResult:
        """Run a forward again, with the buffers and generator states of the first run.

        Args:
            run: A function that runs the module and the loss on the inputs of the checkpoint.
            checkpoint: The checkpoint that `run_first_forward` returned.

        Returns:
            The outputs and the leaves, with the graph for a backward.

        Raises:
            ModelError: The inputs were written to, or the outputs differ from the first run. Or the
                forward writes to a trained parameter, or writes to a buffer through another
                reference than the attribute of its module. Outputs are compared on a CPU and in
                debug mode. Only the first recomputation in training mode and the first in
                evaluation mode check for writes to trained parameters.
        """
        checkpoint.require_unwritten(self.stage, self.mb)
        parameters = self._list_unchecked_parameters()
        checksums = compute_checksums(parameters)
        with self._restore_found_state(checkpoint):
            result = run()
        if compute_checksums(parameters) != checksums:
            raise ModelError(
                f"a forward of stage {self.stage} writes to trained Parameters, and recomputation "
                "would write to them twice",
                hint="write to Parameters between steps",
            )
        if self._checksum_outputs(result[0]) != checkpoint.output_checksums:
            raise ModelError(
                f"stage {self.stage} returns a different output for microbatch {self.mb} when it "
                "is recomputed",
                hint="draw random numbers from torch's default generators only, and keep all state "
                "in Parameters and buffers",
            )
        return result

    @contextmanager
    def _restore_found_state(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Set the buffers and generator states of the first run within this context."""
        current_entries = [(table, name, table.get(name)) for table, name, _ in checkpoint.buffers]
        buffers = [b for *_, b in current_entries if b is not None]
        traces = get_write_traces(buffers)
        states = self._get_generator_states()
        for table, name, saved_buffer in checkpoint.buffers:
            # Do not write to the present tensor: autograd may have saved it.
            table[name] = saved_buffer
        self._set_generator_states(checkpoint.generator_states)
        try:
            yield
        finally:
            for table, name, buffer in current_entries:
                table[name] = buffer
            self._set_generator_states(states)
        if get_write_traces(buffers) != traces:
            raise ModelError(
                f"stage {self.stage} writes to a buffer through another reference than "
                "self.name, so recomputation would write to it twice",
                hint="write to the buffer as self.name, and keep no buffers in lists",
            )

    def _refuse_backward(self, _: object) -> Tensor:
        """Raise ModelError, because a forward that unpacks a saved tensor runs a backward."""
        raise ModelError(
            f"stage {self.stage} runs a backward in its forward, such as torch.autograd.grad, but "
            "the first forward of a recomputed stage keeps no tensors for a backward",
            hint=f"recompute other stages only: recompute=lambda stage, mb: stage != {self.stage}",
        )

    def _list_unchecked_parameters(self) -> list[Tensor]:
        """Return the trained parameters whose values this recomputation must compare.

        In the first recomputation in training mode, and in the first in evaluation mode, these are
        all trained parameters. Later recomputations compare no parameter. The caller compares
        values, because a write may leave the version counter unchanged.
        """
        mode = self.module.training
        if mode in self.checked_modes:
            return []
        self.checked_modes.add(mode)
        return [p for p in self.module.parameters() if p.requires_grad]

    def _get_generator_states(self) -> Sequence[Tensor]:
        random_streams = self.state.random_streams
        if random_streams.seed is not None:
            return []
        return [generator.get_state() for generator in random_streams.generators]

    def _set_generator_states(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self.state.random_streams.generators, states, strict=False):
            generator.set_state(state)

    def _get_target_versions(self) -> list[int]:
        if not self.is_last_stage:
            return []
        leaves: list[Any] = tree_leaves(self.state.batch.targets[self.mb])
        return get_versions([x for x in leaves if isinstance(x, Tensor)])

    def _checksum_outputs(self, outputs: Sequence[Tensor]) -> list[int]:
        """Return a checksum of each output. On a GPU the list is empty, except in debug mode."""
        if self.state.device.type != "cpu" and not self.state.options.execution.debug:
            return []
        return [compute_checksum(y.detach()) for y in outputs]


def _may_be_written(tensor: Tensor) -> bool:
    """Return whether a tensor is a buffer or an untrained parameter, which a forward may change."""
    return not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)


def _copy_tensors(requests: Sequence[tuple[Tensor, bool, bool]]) -> list[Tensor]:
    """Return, for each request, the tensor itself or a copy of it.

    A request is (tensor, needs_copy, on_host). With `on_host`, the copy of a parameter is in host
    memory, because copies of all parameters may need much memory. Requests for the same tensor
    share a copy.
    """
    copies: dict[Tensor, Tensor] = {}
    for tensor, needs_copy, on_host in requests:
        if needs_copy and tensor not in copies:
            to_host = on_host and isinstance(tensor, nn.Parameter)
            copies[tensor] = (
                tensor.detach().to("cpu", copy=True) if to_host else tensor.detach().clone()
            )
    return [copies[tensor] if needs_copy else tensor for tensor, needs_copy, _ in requests]


def _match_tensor_type(saved: Tensor, current: Tensor) -> Tensor:
    """Return `saved` as a Parameter if `current` is a Parameter, or else as a detached tensor."""
    if isinstance(current, nn.Parameter):
        return nn.Parameter(saved.to(current.device), requires_grad=False)
    # Detach: an offload replaces the `data` of the result, and the module may still use `saved`.
    return saved.detach()


def _describe_kind(tensor: Tensor) -> str:
    return "Parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _discard_saved_tensor(_: object) -> None:
    """Discard a tensor that autograd saves, because the first forward has no backward."""
