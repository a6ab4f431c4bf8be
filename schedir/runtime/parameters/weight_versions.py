"""Keep old versions of the weights of a stage for delayed updates (PipeDream-2BW).

Only programs with several updates need old versions. The optimizer changes the parameters of the
module in place. Forwards and backwards use copies of these parameters. The `grad` of a copy is the
`grad` of its parameter, so all gradients go into the same tensors.

References:
    Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from schedir.errors import ModelError
from schedir.ir.isa.instructions import COMPUTE_OPS, Instr
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime.autograd.node_hook_detection import register_observer
from schedir.runtime.model_checks.tensor_fingerprint import compute_checksum, get_local_shard
from schedir.runtime.parameters.parameter_copies import make_parameter_like, require_no_node_hooks


class WeightVersions:
    """Copies of a stage's trained weights for each weight version in use.

    Version n has the values of the weights after n updates of the current step.

    Args:
        module: The stage.
        shape: The pipeline shape.
        indexed_instructions: The instructions of the stage with their indices in the stream, in
            order. They determine the last use of each version.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: PipelineShape,
        indexed_instructions: Iterable[tuple[int, Instr]],
    ) -> None:
        self.stage = -1
        # Version -> index in the stream of the last instruction that uses it.
        self.last_uses: dict[int, int] = {}
        for index, (op, stage, mb) in indexed_instructions:
            self.stage = stage
            if op in COMPUTE_OPS:
                self.last_uses[int(shape.weight_version(stage, mb))] = index
        self.module_entries = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
            if parameter.requires_grad
        ]
        self.copies_by_version: dict[int, dict[int, nn.Parameter]] = {}
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        # During a step: observers on the autograd nodes of the module's original parameters.
        self.hooks: list[tuple[Node, RemovableHandle]] = []
        # Version -> result of `_collect_traces` when the version was copied.
        self.traces: dict[int, list[tuple[int, ...]]] = {}

        # True in the first step, which compares checksums. Checksums also show writes to `data`.
        self.compares_values = True

    def begin_step(self) -> None:
        """Begin a step, and keep the current weights as version 0.

        If a backward reaches an original parameter of the module, an observer raises ModelError.

        Raises:
            ModelError: A parameter has hooks that its copies would not call.
        """
        for parameter, name in self.names.items():
            require_no_node_hooks(parameter, f"{name} of stage {self.stage}")
            node = get_gradient_edge(parameter).node
            self.hooks.append((node, register_observer(node, partial(_refuse_direct_use, name))))
        self.keep_version(0, 0)

    def keep_version(self, version: int, index: int) -> None:
        """Copy the current weights as a version, and drop versions that are no longer used.

        Args:
            version: The number of the version.
            index: The index of the current instruction in the stream. Versions whose last use is
                before this index are dropped.

        Raises:
            ModelError: The stage wrote to a copy that is dropped.
        """
        for old_version in [v for v in self.copies_by_version if self.last_uses[v] < index]:
            self.require_unwritten(old_version)
            del self.copies_by_version[old_version]
        if version in self.last_uses:
            copies = self.copies_by_version[version] = {}
            for _, _, parameter in self.module_entries:
                if id(parameter) not in copies:
                    copies[id(parameter)] = copy = make_parameter_like(
                        parameter, parameter.detach().clone()
                    )
                    copy.grad = parameter.grad  # all copies add to the same gradient
            self.traces[version] = self._collect_traces(version)

    def end_step(self) -> None:
        """Check the remaining copies at the end of a step.

        Raises:
            ModelError: The stage wrote to a copy.
        """
        self.require_unwritten()
        self.compares_values = False

    def require_unwritten(self, *versions: int) -> None:
        """Check that the stage wrote to no copy.

        A write to a copy would be missing in the original parameter of the module.

        Args:
            *versions: The versions to check. By default all versions that are kept.

        Raises:
            ModelError: The stage wrote to a copy.
        """
        for version in versions or [*self.copies_by_version]:
            if (new_traces := self._collect_traces(version)) == self.traces[version]:
                continue
            originals = {id(p): p for p in self.names}
            for key, old_trace, new_trace in zip(
                self.copies_by_version[version], self.traces[version], new_traces, strict=True
            ):
                if old_trace != new_trace:
                    raise self._write_error(originals[key])

    def require_in_place(self, version: int) -> None:
        """Check that the module still has the copies that `use` has set.

        Args:
            version: The version that `use` has set.

        Raises:
            ModelError: The module has replaced a copy by another Parameter.
        """
        for owner, name, parameter in self.module_entries:
            if owner._parameters.get(name) is not self.copies_by_version[version][id(parameter)]:
                raise self._write_error(parameter)

    def _write_error(self, parameter: nn.Parameter) -> ModelError:
        return ModelError(
            f"stage {self.stage} writes to its weight {self.names[parameter]} in a step, but a "
            "program of several updates computes with copies of weights",
            hint="write to weights between steps (for an embedding, set max_norm=None), or "
            "compile a program with one update",
        )

    def _collect_traces(self, version: int) -> list[tuple[int, ...]]:
        """Return, for each copy of a version, values that change if the copy is written to.

        These values are the version counter and the address of the copy, and in the first step a
        checksum. Only the checksum shows a write to `copy.data`. On a GPU the checksum is 0,
        because the host would have to wait for the GPU.
        """
        copies = self.copies_by_version[version].values()
        traces: list[tuple[int, ...]] = [(copy._version, copy.data_ptr()) for copy in copies]
        if not self.compares_values:
            return traces
        shards = (get_local_shard(copy.detach()) for copy in copies)
        checksums = [0 if shard.is_cuda else compute_checksum(shard) for shard in shards]
        return [(*trace, checksum) for trace, checksum in zip(traces, checksums, strict=True)]

    def use(self, version: int) -> None:
        """Set the copies of a version as the parameters of the module.

        Args:
            version: The version. `keep_version` must have copied it.
        """
        copies = self.copies_by_version[version]
        for owner, name, parameter in self.module_entries:
            owner._parameters[name] = copies[id(parameter)]

    def list_copies(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """Return the copies of a parameter in all versions that are kept.

        Args:
            parameter: The original parameter of the module.
        """
        return [copies[id(parameter)] for copies in self.copies_by_version.values()]

    def restore(self) -> None:
        """Put the original parameters back into the module, and drop all versions."""
        for owner, name, parameter in self.module_entries:
            owner._parameters[name] = parameter
        self.copies_by_version.clear()
        self.traces.clear()
        for _, handle in self.hooks:
            handle.remove()
        self.hooks.clear()


def _refuse_direct_use(name: str, *gradients: object) -> None:
    """Raise ModelError: a graph contains an original parameter of the module, not a copy."""
    raise ModelError(
        f"a forward uses {name} through a reference outside of its module, but the module has "
        "versions of it for several updates",
        hint="read it from its module in each forward, and keep no other reference to it",
    )
