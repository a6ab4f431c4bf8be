"""Models: what a training run needs of a model of each kind, beside its configuration.

A row here is of the kind of that name in `training/kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.models import llama
from schedir.training import gpt, gpt_pieces
from schedir.training.kinds import ModelConfig, kind_of


class Module(Protocol):
    """The module of a model: what makes a stage of it, this rank's shard; the loss of what the last
    stage gives; and how many targets count in it."""

    @property
    def build_stage(self) -> Callable[..., nn.Module]: ...

    def loss(self, found: Any, targets: Tensor, /, tp: ProcessGroup | None) -> Tensor: ...

    def count_tokens(self, targets: Tensor) -> int: ...


class Model(NamedTuple):
    """A model: its module.  Of a kind that has pieces: those of a stage, and what passes between
    stages of so many pieces, given what passes between whole ones, how many are frozen, and by how
    many ranks tokens are shared."""

    module: Module
    pieces: Callable[[Any], list[nn.Module]] | None = None
    between: Callable[[Sequence[int], Any, int, int], dict[int, Any]] | None = None


MODELS: Final = {
    "gpt": Model(gpt, gpt_pieces.pieces, gpt_pieces.boundaries),
    "llama": Model(llama),
}


def model_of(config: ModelConfig) -> Model:
    """The model that a configuration is of."""
    return MODELS[kind_of(config)]
