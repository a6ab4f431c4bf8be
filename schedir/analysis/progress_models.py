"""Progress models: what a transport promises about the order of the transfers of one rank.

Whatever a transport promises, transfers of one queue pass in their order, and those of different
queues do not hold each other up.  A model says how many queues there are.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from schedir.errors import UsageError, describe
from schedir.retired_names import get_rename_hint

ProgressModel = Literal[
    "per_edge", "per_pair", "per_direction", "per_device", "torch_lazy", "blocking_serial"
]  # fmt: skip


class ModelRow(NamedTuple):
    """How a rank's transfers are queued: apart from what else it does (`has_lane_queues`), for each
    rank that it talks to (`has_peer_queues`), for activations and gradients (`has_kind_queues`),
    and for sends and receives (`has_direction_queues`).  A channel, in which messages match by
    position, is a pair of ranks, or with `has_kind_queues` each kind between them.  With
    `has_batch_queues` a group that has both sends and receives is in a queue of the rank's own, on
    a communicator of all ranks, and what is in no such group is issued alone.
    `description` says of transfers how they queue, `transports` which transports behave so.
    """

    name: ProgressModel
    has_lane_queues: bool
    has_peer_queues: bool
    has_kind_queues: bool
    has_direction_queues: bool
    has_batch_queues: bool
    description: str
    transports: str


MODEL_ROWS: Final[tuple[ModelRow, ...]] = (
    ModelRow(
        "per_edge", True, True, True, True, False,
        "queue per directed edge, activations and gradients apart",
        "one 2-rank group per directed edge; Gloo with a tag per lane; shared memory",
    ),
    ModelRow(
        "per_pair", True, True, False, False, False,
        "queue per unordered pair of ranks",
        "torch's lazily created point-to-point communicators, for what is issued alone",
    ),
    ModelRow(
        "per_direction", True, False, True, False, False,
        "queue per rank for activations, and one for gradients",
        "two communicators for the pipeline, one for each direction, as of pytorch#186173",
    ),
    ModelRow(
        "per_device", True, False, False, False, False,
        "queue per rank",
        "one communicator for the pipeline: `batch_isend_irecv` for all that is issued, or NCCL "
        "that is initialised eagerly (`init_process_group(device_id=...)`)",
    ),
    ModelRow(
        "torch_lazy", True, True, False, False, True,
        "queue per unordered pair of ranks for what is issued alone, and queue per rank for groups "
        "with both sends and receives; a message of which only one end is in such a group never "
        "meets",
        "torch.distributed.pipelining 2.13 over NCCL that is initialised lazily (no `device_id`)",
    ),
    ModelRow(
        "blocking_serial", False, False, False, False, False,
        "queue per rank, compute included",
        "blocking sends; the strictest",
    ),
)  # fmt: skip
MODELS: Final = tuple(row.name for row in MODEL_ROWS)
assert get_args(ProgressModel) == MODELS


def require_model(progress_model: ProgressModel) -> ProgressModel:
    """The progress model, if it is one; raises UsageError if not."""
    if not isinstance(progress_model, str) or progress_model not in MODELS:
        raise UsageError(
            f"progress_model must be one of {', '.join(MODELS)}, not {describe(progress_model)}",
            hint=get_rename_hint("progress_model", progress_model),
            fields=["progress_model"],
        )
    return progress_model


def get_model_row(progress_model: ProgressModel) -> ModelRow:
    """What a model promises."""
    return MODEL_ROWS[MODELS.index(require_model(progress_model))]
