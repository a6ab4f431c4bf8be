"""Progress models: what a transport promises about the transfers of one rank.

Whatever a transport promises, transfers of one queue pass in their order, and those of different
queues do not hold each other up.  A model says how many queues there are.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from schedir.errors import UsageError, said

Model = Literal["edge", "pair", "device", "serial"]


class ModelRow(NamedTuple):
    """How a rank's transfers are queued: apart from what else it does (`lanes`), for each rank
    that it talks to (`peers`), and for each kind and direction of message (`ways`).  A channel, in
    which messages match by position, is a pair of ranks, or with `ways` each kind between them.
    `doc` says of transfers how they queue, `who` which transports behave so.
    """

    name: Model
    lanes: bool
    peers: bool
    ways: bool
    doc: str
    who: str


MODEL_ROWS: Final[tuple[ModelRow, ...]] = (
    ModelRow(
        "edge", True, True, True,
        "queue per directed edge, activations and gradients apart",
        "one 2-rank group per directed edge; Gloo with a tag per lane; shared memory",
    ),
    ModelRow(
        "pair", True, True, False,
        "queue per unordered pair of ranks",
        "torch's lazily created point-to-point communicators",
    ),
    ModelRow(
        "device", True, False, False,
        "queue per rank",
        "one communicator for the pipeline, `batch_isend_irecv`",
    ),
    ModelRow(
        "serial", False, False, False,
        "queue per rank, compute included",
        "blocking sends; the strictest",
    ),
)  # fmt: skip
MODELS: Final = tuple(row.name for row in MODEL_ROWS)
assert get_args(Model) == MODELS


def require_model(model: Model) -> Model:
    """The progress model, if it is one; raises UsageError if not."""
    if not isinstance(model, str) or model not in MODELS:
        raise UsageError(f"model must be one of {', '.join(MODELS)}, not {said(model)}")
    return model


def model_row(model: Model) -> ModelRow:
    """What a model promises."""
    return MODEL_ROWS[MODELS.index(require_model(model))]
