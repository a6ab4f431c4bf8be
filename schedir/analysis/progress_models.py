"""Progress models: the order in which a transport runs the transfers of a rank.

Under every model, transfers of one queue pass in order, and transfers of different queues do not
block each other. A model defines which transfers share a queue.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from schedir.errors import UsageError, describe
from schedir.retired_names import get_rename_hint

ProgressModel = Literal[
    "per_edge", "per_pair", "per_direction", "per_device", "torch_lazy", "blocking_serial"
]  # fmt: skip


class ModelRow(NamedTuple):
    """A row of the table of progress models.

    In a channel, the k-th send matches the k-th receive. There is a channel for each ordered pair
    of ranks. With `has_kind_queues`, each kind of message between the two ranks has a separate
    channel.

    Attributes:
        name: The name of the model.
        has_lane_queues: True if transfers and other instructions of the rank have separate queues.
        has_peer_queues: True if a rank has a queue for each peer rank.
        has_kind_queues: True if activations and gradients have separate queues.
        has_direction_queues: True if sends and receives have separate queues.
        has_batch_queues: True if groups with both sends and receives have a separate queue per
            rank, on a communicator of all ranks. Transfers in a group that has only sends or only
            receives are then issued one by one.
        description: The queues of transfers, as text for users.
        transports: The transports that this model describes, as text for users.
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
        "for each directed edge (a sender and a receiver), one queue for activations and one for "
        "gradients",
        "one 2-rank group per directed edge; Gloo with a tag per lane; shared memory",
    ),
    ModelRow(
        "per_pair", True, True, False, False, False,
        "one queue per pair of ranks, for both directions",
        "torch's lazily created point-to-point communicators, for transfers that are issued alone",
    ),
    ModelRow(
        "per_direction", True, False, True, False, False,
        "one queue per rank for activations, and one for gradients",
        "two communicators for the pipeline, one for each direction, as in pytorch#186173",
    ),
    ModelRow(
        "per_device", True, False, False, False, False,
        "one queue per rank",
        "one communicator for the pipeline: `batch_isend_irecv` for all transfers, or NCCL that is "
        "initialised eagerly (`init_process_group(device_id=...)`)",
    ),
    ModelRow(
        "torch_lazy", True, True, False, False, True,
        "one queue per pair of ranks for transfers that are issued alone, and one queue per rank "
        "for groups with both sends and receives; a message hangs if only its send or only its "
        "receive is in such a group",
        "torch.distributed.pipelining 2.13 over NCCL that is initialised lazily (no `device_id`)",
    ),
    ModelRow(
        "blocking_serial", False, False, False, False, False,
        "one queue per rank, which also contains compute",
        "blocking sends; a program that finishes under this model also finishes under all others, "
        "except for `torch_lazy`",
    ),
)  # fmt: skip
MODELS: Final = tuple(row.name for row in MODEL_ROWS)
assert get_args(ProgressModel) == MODELS


def require_model(progress_model: ProgressModel) -> ProgressModel:
    """Verify that `progress_model` is the name of a progress model, and return it.

    Args:
        progress_model: The name.

    Raises:
        UsageError: There is no such model.
    """
    if not isinstance(progress_model, str) or progress_model not in MODELS:
        raise UsageError(
            f"progress_model must be one of {', '.join(MODELS)}, not {describe(progress_model)}",
            hint=get_rename_hint("progress_model", progress_model),
            fields=["progress_model"],
        )
    return progress_model


def get_model_row(progress_model: ProgressModel) -> ModelRow:
    """Return the row of a progress model.

    Args:
        progress_model: The name of the model.

    Raises:
        UsageError: There is no such model.
    """
    return MODEL_ROWS[MODELS.index(require_model(progress_model))]
