"""Refuse stages that overwrite an output while it is still needed.

torch may still be sending an output when the next forward runs, and it keeps the last stage's
outputs until the step ends. If a stage returns the same buffer for each microbatch, torch would
send or keep the wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError
from schedir.runtime.model_checks.tensor_fingerprint import checksum_on_device, get_versions

OutputKey = tuple[int, int]  # stage and microbatch


class _Output(NamedTuple):
    """An output, and its version and checksum when it was recorded.

    `checksum` is None if values are not compared.

    `number` is the index of the output among all outputs of the forward.
    """

    number: int
    tensor: Tensor
    version: int
    checksum: Tensor | None


class PendingOutputs:
    """The outputs of a rank's stages that the current step still needs.

    Args:
        by_value: True to compare checksums of outputs in addition to version counters. Checksums
            also detect writes through `.data`, custom kernels and replayed CUDA graphs.
    """

    def __init__(self, *, by_value: bool) -> None:
        self._by_value = by_value
        self._needed_outputs: dict[OutputKey, list[_Output]] = {}
        self._latest_mb: dict[int, int] = {}  # Stage -> microbatch of its latest forward.
        # Results of comparisons on a GPU. The host reads them only at the end of the step, because
        # reading them waits for the GPU.
        self._gpu_comparisons: list[tuple[OutputKey, _Output, Tensor]] = []

    def add(self, stage: int, mb: int, tensors: Iterable[Any]) -> None:
        """Add the outputs of a forward.

        Args:
            stage: The stage.
            mb: The microbatch.
            tensors: The outputs. Anything but tensors is ignored.

        Raises:
            ModelError: The forward wrote to the outputs of the stage's last forward.
        """
        self.require_unwritten((stage, self._latest_mb.get(stage, -1)))
        self._latest_mb[stage] = mb
        self._needed_outputs[stage, mb] = [
            _Output(k, tensor, _get_version(tensor), self._checksum(tensor))
            for k, tensor in enumerate(tensors)
            if isinstance(tensor, Tensor)
        ]

    def note_read(self, stage: int, mb: int) -> None:
        """Record that the next stage, on the same rank, has read the outputs of a forward.

        From now on, only outputs with a gradient are needed, until their backward. The next stage
        may have written to its inputs. So later checks compare these outputs with their state at
        this call.

        Args:
            stage: The stage of the outputs.
            mb: The microbatch.
        """
        key = stage, mb
        if key in self._needed_outputs:
            self._needed_outputs[key] = [
                output._replace(version=_get_version(output.tensor), checksum=None)
                for output in self._needed_outputs[key]
                if output.tensor.requires_grad
            ]

    def release(self, stage: int, mb: int) -> None:
        """Check the outputs of a forward when its backward begins, and forget them.

        A gradient of these outputs has arrived, so the outputs were received. If no output
        requires a gradient, no gradient can show this. Then this object keeps the outputs until the
        step ends.

        Args:
            stage: The stage.
            mb: The microbatch.

        Raises:
            ModelError: An output was overwritten.
        """
        key = stage, mb
        self.require_unwritten(key)
        if any(output.tensor.requires_grad for output in self._needed_outputs.get(key, ())):
            del self._needed_outputs[key]

    def require_unwritten(self, key: OutputKey) -> None:
        """Refuse a write to an output that is still needed.

        Args:
            key: The stage and the microbatch of the outputs.

        Raises:
            ModelError: An output was overwritten.
        """
        for output in self._needed_outputs.get(key, ()):
            if _get_version(output.tensor) != output.version:
                raise _make_overwrite_error(key, output)
            if output.checksum is None:
                continue
            differs = self._checksum(output.tensor) != output.checksum
            if output.tensor.device.type != "cpu":
                self._gpu_comparisons.append((key, output, differs))
            elif differs:
                raise _make_overwrite_error(key, output)

    def finish(self) -> None:
        """Check all outputs that are needed until the end of the step, and forget them.

        Raises:
            ModelError: An output was overwritten.
        """
        for key in self._needed_outputs:
            self.require_unwritten(key)
        self._needed_outputs.clear()
        self._latest_mb.clear()
        for key, output, differs in self._gpu_comparisons:
            if bool(differs):
                raise _make_overwrite_error(key, output)
        self._gpu_comparisons.clear()

    def _checksum(self, tensor: Tensor) -> Any:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return checksum_on_device(tensor.detach()) if self._by_value and is_plain else None


def _get_version(tensor: Tensor) -> int:
    (version,) = get_versions([tensor])
    return version


def _make_overwrite_error(key: OutputKey, output: _Output) -> ModelError:
    stage, mb = key
    return ModelError(
        f"output {output.number} of stage {stage} for microbatch {mb} was overwritten while it was "
        "still needed: wrong numbers would be sent or returned",
        hint="return a new tensor for each microbatch: return buffer.clone()",
        fields=["stages"],
    )


def can_merge_outputs(outputs: Sequence[Any]) -> bool:
    """Return whether the outputs of microbatches can be concatenated along their first dimension.

    Args:
        outputs: The output of each microbatch: a tensor, or a structure of tensors.
    """
    shapes = {
        tuple(leaf.shape[1:] if isinstance(leaf, Tensor) else () for leaf in tree_leaves(output))
        for output in outputs
    }
    return len(shapes) <= 1
