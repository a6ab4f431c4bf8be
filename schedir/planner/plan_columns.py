"""Many plans as a table: one column for each field of a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.planner.estimate.schedule_formulas import FAMILIES
from schedir.planner.parallel_plan import Attention, Order, ParallelPlan
from schedir.planner.transformer.layer_division import RankGroupShare, even, shares
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.activation_bytes import Recompute

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NAMES: Final = tuple(FAMILIES)  # a schedule's number is its place here
RECOMPUTES: Final[tuple[Recompute, ...]] = get_args(Recompute)


class RankGroupShares(NamedTuple):
    """The shares of all plans, each field of `RankGroupShare` as an array of a row for each plan
    and a column for each share; where a plan has fewer, their `number` is 0."""

    number: Ints
    rank: Ints
    layers: Ints
    first: NDArray[np.bool_]
    last: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PlanColumns:
    """A column of whole numbers for each field of a choice, as `ParallelPlan` has them; `schedule`
    and `recompute` are numbers of `NAMES` and `RECOMPUTES`, and `sequence_parallel` is 0 or 1.

    What all plans have alike is said once.  Layers are divided as evenly as can be (`even`), unless
    `layers_of` is told.
    """

    pp: Ints
    tp: Ints
    dp: Ints
    stages_per_rank: Ints
    microbatch_size: Ints
    microbatches: Ints
    schedule: Ints
    recompute: Ints
    zero: Ints
    sequence_parallel: Ints
    cp: Ints
    ep: Ints
    attention: Attention = "softmax"
    rank_order: Order = "tp-pp-dp"
    layers_per_stage: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.pp)

    @classmethod
    def of(cls, choice: ParallelPlan) -> PlanColumns:
        """One choice alone.  Raises UsageError for one that has anything on the host, of whose
        copies closed forms know nothing."""
        if choice.offloads:
            raise simulated_only()
        each = {f.name: getattr(choice, f.name) for f in fields(cls)}
        each["schedule"] = NAMES.index(choice.schedule)
        each["recompute"] = RECOMPUTES.index(choice.recompute)
        each |= {name: np.array([int(each[name])]) for name in COLUMNS}
        return cls(**each)

    def take(self, which: Any) -> PlanColumns:
        """Some of the plans, by number or by mask."""
        return replace(self, **{name: getattr(self, name)[which] for name in COLUMNS})

    def choice(self, model: TransformerSpec, number: int) -> ParallelPlan:
        """One of them; one that does not divide evenly says its layers."""
        each: dict[str, Any] = {name: int(getattr(self, name)[number]) for name in COLUMNS}
        each["schedule"] = NAMES[each["schedule"]]
        each["recompute"] = RECOMPUTES[each["recompute"]]
        each["sequence_parallel"] = bool(each["sequence_parallel"])
        each |= {name: getattr(self, name) for name in ALIKE}
        if not self.layers_per_stage and model.layers % (
            stages := each["pp"] * each["stages_per_rank"]
        ):
            each["layers_per_stage"] = even(model.layers, stages)
        return ParallelPlan(**each)

    def distinct(self, *names: str) -> tuple[Ints, Ints]:
        """The first plan of each combination of these columns, and for each plan which it has."""
        code = np.zeros(len(self), np.int64)
        for name in names:
            column = getattr(self, name)
            code = code * (int(column.max(initial=0)) + 1) + column
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        return first, which

    def shares(self, model: TransformerSpec, *, alike: bool = True) -> RankGroupShares:
        """What ranks have: `shares` of each plan."""
        vee = np.array([FAMILIES[name].vee for name in NAMES], np.int64)[self.schedule]
        _, which = np.unique(
            (self.pp * 2**20 + self.stages_per_rank) * 2 + vee, return_inverse=True
        )
        first = np.unique(which, return_index=True)[1]
        each = [shares(model, self.choice(model, i), alike=alike) for i in first.tolist()]
        most = max(map(len, each), default=0)
        none = RankGroupShare(0, 0, 0, False, False)
        table = np.array([[*own, *[none] * (most - len(own))] for own in each], np.int64)
        columns = [table.reshape(len(each), most, -1)[which, :, k] for k in range(5)]
        number, rank, layers, *ends = columns
        return RankGroupShares(number, rank, layers, *(end.astype(bool) for end in ends))


def simulated_only() -> UsageError:
    """The refusal to tell without a simulation what offloads."""
    return UsageError(
        "closed forms know nothing of copies to the host and back: plans that offload are "
        "simulated, which exact=False, or --closed-form-only, leaves out",
        fields=["offload", "exact"],
    )


ALIKE: Final = ("attention", "rank_order", "layers_per_stage")
COLUMNS: Final = tuple(f.name for f in fields(PlanColumns) if f.name not in ALIKE)
