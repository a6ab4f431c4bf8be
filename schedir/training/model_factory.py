"""Build the modules of each kind of model that `schedir train` trains.

Each entry of `MODELS` belongs to the kind of the same name in `training/config/model_kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.models import gpt, gpt_segments, llama, moe_gpt
from schedir.training.config.model_kinds import ModelConfig, get_model_kind


class ModelModule(Protocol):
    """The Python module of a kind of model."""

    @property
    def build_stage(self) -> Callable[..., nn.Module]:
        """Return the function that builds this rank's shard of a stage."""

    def loss(self, output: Any, targets: Tensor, /, tp: ProcessGroup | None) -> Tensor:
        """Return the sum of the losses of all targets, from the output of the last stage.

        Args:
            output: The output of the last stage.
            targets: The targets, int64 (samples, context).
            tp: The tensor-parallel group. None without tensor parallelism.
        """

    def count_tokens(self, targets: Tensor) -> int:
        """Return the number of targets that the loss includes.

        Args:
            targets: The targets, int64 (samples, context).
        """


class TrainedModel(NamedTuple):
    """The functions that build a kind of model.

    Args:
        module: The Python module of the kind.
        split_stage: Splits a stage into its segments. None if the kind has no segments.
        make_boundaries: Returns the boundaries between segments, by program stage. Its arguments
            are the number of segments of each stage, the boundary between unsegmented stages, the
            number of frozen stages, and the number of ranks that share the tokens. None if the kind
            has no segments, or if `ProgramStages` builds the boundaries itself (kind "moe").
    """

    module: ModelModule
    split_stage: Callable[[Any], list[nn.Module]] | None = None
    make_boundaries: Callable[[Sequence[int], Any, int, int], dict[int, Any]] | None = None


MODELS: Final = {
    "gpt": TrainedModel(gpt, gpt_segments.split_stage, gpt_segments.build_boundaries),
    "llama": TrainedModel(llama),
    "moe": TrainedModel(moe_gpt, moe_gpt.split_stage),
}


def get_trained_model(config: ModelConfig) -> TrainedModel:
    """Return the functions that build the model of a configuration.

    Args:
        config: The section [model] of a configuration.
    """
    return MODELS[get_model_kind(config)]
