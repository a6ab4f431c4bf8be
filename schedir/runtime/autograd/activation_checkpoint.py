"""Save the inputs of a forward, and run it again before its backward.

A forward that is run again must do the same again.  Its weights are the microbatch's version, its
random numbers are seeded as for the first time, and its keywords are the batch's.  What else it may
find changed are buffers that forwards write to, as running statistics; Parameters that nobody
trains, if forwards write to them, as to a mean of others; and generators that nobody seeds.  Of
these it keeps what they were: the second run has them in their places, and leaves all as it finds
it, for what a forward changes it has changed the first time.
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
from schedir.runtime.rank_state import State

_TensorTable = dict[str, Any]  # of a module: buffers or Parameters, by name
_ForwardResult = tuple[Sequence[Tensor], Sequence[Tensor]]  # what a stage puts out, and its leaves


class Checkpoint(NamedTuple):
    """The inputs of a stage for a microbatch, and what else its forward found.

    `buffers` are those that it has changed, and Parameters, as they were, each with its place;
    `generator_states` are the states of those that nobody seeds.  `output_checksums` are of what it
    gave, by which that is known again.  `input_versions` are the version counters of the inputs;
    they are empty after the first step, and after the inputs were offloaded.
    """

    inputs: Sequence[Tensor]
    buffers: Sequence[tuple[_TensorTable, str, Tensor]]
    generator_states: Sequence[Tensor]
    output_checksums: Sequence[int]
    input_versions: Sequence[int]

    def require_unwritten(self, stage: int, mb: int) -> None:
        """Raise ModelError if an input was written to since the first forward."""
        if self.input_versions and self.input_versions != get_versions(self.inputs):
            raise ModelError(
                f"the input of stage {stage} for microbatch {mb} was written to before the stage "
                "was recomputed",
                hint="let the stage before it return a new tensor: self.buffer.clone()",
            )


class Checkpoints:
    """Makes the checkpoint of a stage for a microbatch, and runs its forward again."""

    def __init__(self, state: State, i: Instr) -> None:
        self.state, self.stage, self.mb = state, i.stage, i.mb
        self.module, self.written_buffers = (
            state.stages[i.stage].module,
            state.stages[i.stage].written_buffers,
        )
        self.checked_modes = state.stages[i.stage].checked_recompute_modes
        self.is_last_stage = i.stage == state.shape.stages - 1
        modules = [self.module]
        if self.is_last_stage and isinstance(state.loss, nn.Module):
            modules.append(state.loss)
        tables: list[tuple[str, _TensorTable]] = [
            (path, table)
            for each in modules
            for path, m in each.named_modules()
            for table in (m._buffers, m._parameters)
        ]
        self.named_entries = [
            (f"{path}.{name}" if path else name, table, name)
            for path, table in tables
            for name in table
        ]

    def run_first_forward(
        self, run: Callable[[], _ForwardResult], inputs: Sequence[Tensor]
    ) -> tuple[_ForwardResult, Checkpoint]:
        """What a forward makes of these inputs, and the checkpoint; autograd keeps nothing of it.

        Raises ModelError where it changes what it would find changed the second time.
        """
        own: list[tuple[str, _TensorTable, str, Tensor]] = [
            (f, t, n, b)
            for f, t, n in self.named_entries
            if (b := t.get(n)) is not None and _may_be_written(b)
        ]
        known = self.written_buffers.get(self.module.training)
        was = _copy_tensors([(b, known is None or f in known, known is None) for f, _, _, b in own])
        traces, generators = get_write_traces([b for *_, b in own]), self._get_generator_states()
        target = self._get_target_versions()
        versions = get_versions(inputs) if self.state.first_step_checks.is_active else ()
        # As if for a backward: without gradients some kernels round otherwise.
        with saved_tensors_hooks(_discard_saved_tensor, self._refuse_backward):
            ran = run()
        if self._get_target_versions() != target:
            raise ModelError(
                f"the loss changes the target of microbatch {self.mb} in place, and needs it again "
                "when the last stage is recomputed",
                hint="let it begin with target = target.clone()",
            )
        into = [x != y for x, y in zip(traces, get_write_traces([b for *_, b in own]), strict=True)]
        other = [t.get(n) is not b for _, t, n, b in own]
        if known is None:
            known = self.written_buffers[self.module.training] = {
                f
                for (f, _, _, b), x, wrote, new in zip(own, was, into, other, strict=True)
                if wrote or new or not has_same_bits(b.detach().to(x.device), x)
            }
        kept = []
        for (full, table, name, b), x, wrote, new in zip(own, was, into, other, strict=True):
            if wrote and full not in known:
                raise ModelError(
                    f"stage {self.stage} writes to its {_describe_kind(b)} {full}, which its first "
                    "forward left alone, and is to be recomputed with what it was",
                    hint="write to it in every forward, or put another in its place",
                )
            if new or full in known:
                kept.append((table, name, _match_tensor_type(x, b)))
        return ran, Checkpoint(inputs, kept, generators, self._checksum_outputs(ran[0]), versions)

    def recompute(
        self, run: Callable[[], _ForwardResult], checkpoint: Checkpoint
    ) -> _ForwardResult:
        """What the forward makes when it is run again.

        Raises ModelError if that is something else, as far as the host may look: on a CPU.
        """
        checkpoint.require_unwritten(self.stage, self.mb)
        trained = self._list_unchecked_parameters()
        sums = compute_checksums(trained)
        with self._restore_found_state(checkpoint):
            ran = run()
        if compute_checksums(trained) != sums:
            raise ModelError(
                f"stage {self.stage} writes to Parameters that it trains, and twice where it is "
                "recomputed",
                hint="write to them between steps",
            )
        if self._checksum_outputs(ran[0]) != checkpoint.output_checksums:
            raise ModelError(
                f"stage {self.stage} gives something else for microbatch {self.mb} when it is "
                "recomputed",
                hint="what it draws must come from torch's default generators, and what else its "
                "output depends on be an input, a Parameter or a buffer",
            )
        return ran

    @contextmanager
    def _restore_found_state(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Within this context buffers and generators are what the first run found."""
        now = [(table, name, table.get(name)) for table, name, _ in checkpoint.buffers]
        real = [b for *_, b in now if b is not None]
        traces = get_write_traces(real)
        states = self._get_generator_states()
        for table, name, was in checkpoint.buffers:
            table[name] = was  # in its place, not into it: others may have saved that
        self._set_generator_states(checkpoint.generator_states)
        try:
            yield
        finally:
            for table, name, buffer in now:
                table[name] = buffer
            self._set_generator_states(states)
        if get_write_traces(real) != traces:
            raise ModelError(
                f"stage {self.stage} writes to a buffer by another name than its module's, and "
                "twice where it is recomputed",
                hint="write to self.name, and keep no buffers in lists",
            )

    def _refuse_backward(self, _: object) -> Tensor:
        """Called for a saved tensor where a forward runs a backward of its own."""
        raise ModelError(
            f"stage {self.stage} runs a backward within its forward, as by torch.autograd.grad, "
            "and is to be recomputed: its first forward keeps no tensor for a backward",
            hint=f"recompute other stages only: recompute=lambda stage, mb: stage != {self.stage}",
        )

    def _list_unchecked_parameters(self) -> list[Tensor]:
        """What the stage trains, when it is run again for the first time: then values tell whether
        a forward writes to it, which may leave no trace."""
        look = self.module.training
        if look in self.checked_modes:
            return []
        self.checked_modes.add(look)
        return [p for p in self.module.parameters() if p.requires_grad]

    def _get_generator_states(self) -> Sequence[Tensor]:
        draws = self.state.random_streams
        return [] if draws.seed is not None else [g.get_state() for g in draws.generators]

    def _set_generator_states(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self.state.random_streams.generators, states, strict=False):
            generator.set_state(state)

    def _get_target_versions(self) -> list[int]:
        """How often the target that the loss is taken against has been written to."""
        if not self.is_last_stage:
            return []
        leaves: list[Any] = tree_leaves(self.state.batch.targets[self.mb])
        return get_versions([x for x in leaves if isinstance(x, Tensor)])

    def _checksum_outputs(self, outputs: Sequence[Tensor]) -> list[int]:
        """Of the bits of each tensor, as numbers, the sum: whatever its order is.  On a CPU."""
        if self.state.device.type != "cpu" and not self.state.debug:
            return []
        return [compute_checksum(y.detach()) for y in outputs]


def _may_be_written(tensor: Tensor) -> bool:
    """Whether a forward may write to it: a buffer, or a Parameter that nobody trains."""
    return not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)


def _copy_tensors(requests: Sequence[tuple[Tensor, bool, bool]]) -> list[Tensor]:
    """Of tensors those that are `wanted` copied, each once, so that who shares one shares its copy;
    of Parameters in the host's memory where it is asked for: all of them may be much."""
    made: dict[Tensor, Tensor] = {}
    for one, wanted, on_host in requests:
        if wanted and one not in made:
            to_host = on_host and isinstance(one, nn.Parameter)
            made[one] = one.detach().to("cpu", copy=True) if to_host else one.detach().clone()
    return [made[one] if wanted else one for one, wanted, _ in requests]


def _match_tensor_type(saved: Tensor, current: Tensor) -> Tensor:
    """What was there, as what is there: a Parameter, and where it is."""
    if isinstance(current, nn.Parameter):
        return nn.Parameter(saved.to(current.device), requires_grad=False)
    return saved.detach()  # offloading frees the memory of this tensor; the module may keep `saved`


def _describe_kind(tensor: Tensor) -> str:
    return "Parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _discard_saved_tensor(_: object) -> None:
    """What autograd keeps of a tensor where there will be no backward."""
