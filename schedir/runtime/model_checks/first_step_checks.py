"""Find stages that misuse memory, in the first step of a program.

A stage usually does the same in each step, so later steps omit these checks to save time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from schedir.errors import ModelError
from schedir.ir.isa.instructions import LOCAL_HANDOVER, VALUES, Value
from schedir.runtime.model_checks.storage_references import StorageReferences
from schedir.runtime.model_checks.tensor_fingerprint import get_versions
from schedir.runtime.parameters.sharded_parameters import ShardedParameters
from schedir.runtime.value_slots import SlotTable, collect_versions, collect_versions_and_sums
from schedir.transports.transport import SlotKey

# The kinds of values that a stage computes: its outputs, and the gradients of its inputs.
OUTPUT_KINDS: Final = frozenset(output_kind for output_kind, _ in LOCAL_HANDOVER.values())


class FirstStepChecks:
    """Refuses stages that overwrite their outputs, or keep references to memory that is reused.

    Args:
        slots: Kind of value -> its slots.
        slot_numbers: (Kind, stage, microbatch) -> index of an instruction that fills a slot with
            the value -> number of this slot.
        device: The rank's device. On a CPU, the checks compare checksums of outputs, and count
            references to memory. On a GPU, they only compare version counters of outputs.

    Attributes:
        buffers: The memory in which messages are received. No stage may keep references to it after
            the step.
        weights: The weights of the stages that ZeRO shards. No stage may keep references to them
            after the step.
    """

    def __init__(
        self,
        slots: Mapping[Value, SlotTable],
        slot_numbers: Mapping[tuple[Value, int, int], Mapping[int, int]],
        device: torch.device,
    ) -> None:
        self.is_active: bool = True
        # Count references only on a CPU. On a GPU, the Work of a message may refer to the memory of
        # the message for longer than a step.
        self.counts_references: bool = device.type == "cpu"
        self.slot_numbers = slot_numbers
        self.buffers: Mapping[SlotKey, Tensor] = {}
        self.weights: list[ShardedParameters] = []
        self.output_slots: list[SlotTable] = [slots[kind] for kind in OUTPUT_KINDS]
        self.fingerprint_of: Callable[[Any], list[int]] = (
            collect_versions_and_sums if device.type == "cpu" else collect_versions
        )
        self.references: StorageReferences = StorageReferences(())
        # Microbatch -> the version counter of the loss when it was computed.
        self.loss_versions: dict[int, list[int]] = {}
        # (Stage, microbatch) -> the version counters of the inputs' gradients after the forward.
        self.gradient_versions: dict[tuple[int, int], list[int]] = {}

    def begin_step(self) -> None:
        """Enable the checks before the first step, and disable them before later steps."""
        for slot_table in self.output_slots:
            slot_table.compute_fingerprint = self.fingerprint_of if self.is_active else None
        if self.is_active and self.counts_references:
            self.references = StorageReferences(self.buffers.values())
            for weights in self.weights:
                weights.count_references()

    def end_step(self, losses: Sequence[Tensor]) -> None:
        """End a step. After the first step, check losses and references.

        Args:
            losses: The loss of each microbatch.

        Raises:
            ModelError: A loss was overwritten, or a stage keeps a reference to memory that is
                reused.
        """
        if self.is_active:
            for mb, versions in self.loss_versions.items():
                if get_versions((losses[mb],)) != versions:
                    raise ModelError(
                        f"the loss of microbatch {mb} was written to before the end of the step",
                        hint="return a new tensor for each microbatch: return self.buffer.clone()",
                    )
            if self.counts_references:
                self.require_released()
                for weights in self.weights:
                    weights.require_released()
            self.gradient_versions.clear()
        self.is_active = False

    def note_gradients(self, stage: int, mb: int, inputs: Sequence[Tensor]) -> None:
        """Record the version counters of the inputs' gradients after a forward.

        The inputs have gradients at this time only if the forward itself ran a backward.

        Args:
            stage: The number of the stage.
            mb: The microbatch.
            inputs: The inputs of the stage.
        """
        self.gradient_versions[stage, mb] = _get_gradient_versions(inputs)

    def has_gradients_of_forward(self, stage: int, mb: int, inputs: Sequence[Tensor]) -> bool:
        """Return whether the gradients of the inputs are unchanged since the forward.

        Args:
            stage: The number of the stage.
            mb: The microbatch.
            inputs: The inputs of the stage.

        Returns:
            True if the gradients are unchanged, or if they were not recorded in this step.
        """
        noted_versions = self.gradient_versions.get((stage, mb))
        return noted_versions is None or noted_versions == _get_gradient_versions(inputs)

    def require_released(self) -> None:
        """Check that no stage keeps a tensor in the memory of a receive buffer.

        Raises:
            ModelError: The memory has more references than before the step.
        """
        slot_keys = [*self.buffers]
        for kind, number in (slot_keys[k] for k in self.references.find_increased()):
            stages = {  # several stages may use the slot
                stage
                for (slot_kind, stage, _), numbers in self.slot_numbers.items()
                if slot_kind == kind and number in numbers.values()
            }
            names = " or ".join(map(str, sorted(stages)))
            raise ModelError(
                f"stage {names} keeps a reference to {VALUES[kind].phrase} that it received, "
                "and a later message is received into the same memory",
                hint="keep a detached copy: self.last = x.detach().clone()",
            )


def _get_gradient_versions(inputs: Sequence[Tensor]) -> list[int]:
    """Return the version counter of each gradient, or -1 for an input without a gradient."""
    return [-1 if x.grad is None else x.grad._version for x in inputs]
