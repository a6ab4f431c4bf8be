"""Check the arguments of a step before its first message, and its outputs until they are sent.

torch may still be sending an output when the next forward runs, and it keeps the last stage's
outputs until the step ends. If a stage returns the same buffer for each microbatch, torch would
send or keep the wrong numbers. `PendingOutputs` refuses stages that overwrite an output while it is
still needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves

from schedir.errors import ModelError, describe
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


def find_indivisible_tensor(named_values: Mapping[str, Any], n_microbatches: int) -> str:
    """Return an error about the first tensor of a batch that cannot be split evenly.

    torch splits such a batch into microbatches of unequal sizes.

    Args:
        named_values: The arguments that are split along their first dimension, by name.
        n_microbatches: Number of microbatches.

    Returns:
        One sentence, or an empty string if all microbatches get equal shapes.
    """
    for name, value in named_values.items():
        for tensor in tree_leaves(value, is_leaf=lambda leaf: isinstance(leaf, BlockMask)):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.size(0) % n_microbatches:
                return (
                    f"{name} has {tensor.size(0)} samples, which n_microbatches={n_microbatches} "
                    "does not divide, but all microbatches must have the same shape"
                )
    return ""


def find_missing_input(stages: Iterable[Any], arguments: Iterable[object]) -> str:
    """Return an error if the first stage needs inputs, but a step has none.

    Args:
        stages: The PipelineStages of this rank.
        arguments: All arguments of the step, and all given lists of microbatches.

    Returns:
        One sentence, or an empty string.
    """
    first_stage = next((stage for stage in stages if stage.is_first), None)
    if first_stage is None or any(argument is not None for argument in arguments):
        return ""
    parameters = inspect.signature(first_stage.submod.forward).parameters.values()
    if not any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    ):
        return ""
    return "step got no inputs, but this rank has stage 0, which needs them"


def find_microbatch_error(
    n_microbatches: int,
    arg_mbs: object,
    kwarg_mbs: object,
    target_mbs: object,
    losses: object,
    *,
    needs_target: bool,
) -> str:
    """Return the first error in the microbatches of a step.

    Args:
        n_microbatches: Number of microbatches.
        arg_mbs: A tuple of arguments for each microbatch, or None.
        kwarg_mbs: A mapping of keywords for each microbatch, or None.
        target_mbs: A target for each microbatch, or None.
        losses: A list for the losses, or None.
        needs_target: True if this rank computes the loss in this step.

    Returns:
        One sentence, or an empty string.
    """
    given_lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
    for name, values in given_lists.items():
        if values is not None and not isinstance(values, list):
            return f"{name} must be a list, not {describe(values)}"
        if isinstance(values, list) and len(values) != n_microbatches:
            return f"{name} must have {n_microbatches} microbatches, not {len(values)}"
    for name, values, types in (
        ("arg_mbs", arg_mbs, (tuple, list)),
        ("kwarg_mbs", kwarg_mbs, (Mapping,)),
    ):
        for mb, microbatch in enumerate(values if isinstance(values, Sequence) else ()):
            if not isinstance(microbatch, types):
                kind_name = "tuple" if name == "arg_mbs" else "mapping"
                return (
                    f"{name} must have a {kind_name} per microbatch, but {name}[{mb}] is "
                    f"{describe(microbatch)}"
                )
    if losses is not None and not isinstance(losses, list):
        return f"losses must be a list, not {describe(losses)}"
    if needs_target and target_mbs is None:
        return "target is missing: loss_fn needs it, as in step(x, target=y)" + _find_other_name(
            kwarg_mbs
        )
    return ""


def _find_other_name(kwarg_mbs: object) -> str:
    """Return the end of a sentence if a keyword of the stages is similar to "target"."""
    keywords = kwarg_mbs[0] if isinstance(kwarg_mbs, list) and kwarg_mbs else {}
    if not (names := get_close_matches("target", [*keywords], 1)):
        return ""
    return f"; the stages get the keyword {names[0]!r}"
