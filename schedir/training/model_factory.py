"""Build the modules of each kind of model that `schedir train` trains.

Each row belongs to the kind of the same name in `training/config/model_kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.models import gpt, gpt_segments, llama
from schedir.training.config.model_kinds import ModelConfig, get_model_kind


class ModelModule(Protocol):
    """The Python module of a kind of model.

    `build_stage` makes this rank's shard of a stage.  `loss` computes the loss from the output of
    the last stage.  `count_tokens` returns the number of targets that count in the loss.
    """

    @property
    def build_stage(self) -> Callable[..., nn.Module]: ...

    def loss(self, output: Any, targets: Tensor, /, tp: ProcessGroup | None) -> Tensor: ...

    def count_tokens(self, targets: Tensor) -> int: ...


class TrainedModel(NamedTuple):
    """A kind of model.

    Args:
        module: Its Python module.
        split_stage: Cuts a stage into its pieces, for kinds that have them.
        make_boundaries: Returns the boundaries between stages of these numbers of pieces, from the
        boundary
            between stages that are not cut, the number of frozen stages, and the number of ranks
            that share the tokens.
    """

    module: ModelModule
    split_stage: Callable[[Any], list[nn.Module]] | None = None
    make_boundaries: Callable[[Sequence[int], Any, int, int], dict[int, Any]] | None = None


MODELS: Final = {
    "gpt": TrainedModel(gpt, gpt_segments.split_stage, gpt_segments.build_boundaries),
    "llama": TrainedModel(llama),
}


def get_trained_model(config: ModelConfig) -> TrainedModel:
    """Return the kind of model to which a configuration belongs."""
    return MODELS[get_model_kind(config)]
