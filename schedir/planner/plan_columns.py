"""Many plans as a table: one column for each field of a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from schedir.errors import UsageError
from schedir.planner.estimate.schedule_formulas import SCHEDULE_FORMULAS
from schedir.planner.parallel_plan import Attention, ParallelPlan, RankOrder
from schedir.planner.transformer.layer_division import (
    RankGroupShare,
    compute_rank_shares,
    divide_evenly,
)
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.activation_bytes import Recompute

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SCHEDULE_NAMES: Final = tuple(SCHEDULE_FORMULAS)  # a schedule's number is its place here
RECOMPUTE_MODES: Final[tuple[Recompute, ...]] = get_args(Recompute)


class RankGroupShares(NamedTuple):
    """The shares of all plans, each field of `RankGroupShare` as an array of a row for each plan
    and a column for each share; where a plan has fewer, their `rank_count` is 0."""

    rank_count: Ints
    first_rank: Ints
    layers: Ints
    has_first_stage: NDArray[np.bool_]
    has_last_stage: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PlanColumns:
    """A column of whole numbers for each field of a choice, as `ParallelPlan` has them; `schedule`
    and `recompute` are numbers of `SCHEDULE_NAMES` and `RECOMPUTE_MODES`, and `sequence_parallel`
    is 0 or 1.

    What all plans have alike is said once.  Layers are divided as evenly as can be
    (`divide_evenly`), unless
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
    rank_order: RankOrder = "tp-pp-dp"
    layers_per_stage: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.pp)

    @classmethod
    def from_plan(cls, plan: ParallelPlan) -> PlanColumns:
        """One choice alone.  Raises UsageError for one that has anything on the host, of whose
        copies closed forms know nothing."""
        if plan.has_offload:
            raise simulation_only_error()
        each = {f.name: getattr(plan, f.name) for f in fields(cls)}
        each["schedule"] = SCHEDULE_NAMES.index(plan.schedule)
        each["recompute"] = RECOMPUTE_MODES.index(plan.recompute)
        each |= {name: np.array([int(each[name])]) for name in COLUMN_NAMES}
        return cls(**each)

    def select(self, selection: Any) -> PlanColumns:
        """Some of the plans, by number or by mask."""
        return replace(self, **{name: getattr(self, name)[selection] for name in COLUMN_NAMES})

    def plan_at(self, model: TransformerSpec, index: int) -> ParallelPlan:
        """One of them; one that does not divide evenly says its layers."""
        each: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in COLUMN_NAMES}
        each["schedule"] = SCHEDULE_NAMES[each["schedule"]]
        each["recompute"] = RECOMPUTE_MODES[each["recompute"]]
        each["sequence_parallel"] = bool(each["sequence_parallel"])
        each |= {name: getattr(self, name) for name in SHARED_FIELDS}
        if not self.layers_per_stage and model.layers % (
            stages := each["pp"] * each["stages_per_rank"]
        ):
            each["layers_per_stage"] = divide_evenly(model.layers, stages)
        return ParallelPlan(**each)

    def find_distinct(self, *column_names: str) -> tuple[Ints, Ints]:
        """The first plan of each combination of these columns, and for each plan which it has."""
        code = np.zeros(len(self), np.int64)
        for name in column_names:
            column = getattr(self, name)
            code = code * (int(column.max(initial=0)) + 1) + column
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        return first, which

    def compute_shares(
        self, model: TransformerSpec, *, merge_equal_ranks: bool = True
    ) -> RankGroupShares:
        """What ranks have: `shares` of each plan."""
        vee = np.array([SCHEDULE_FORMULAS[name].is_vee for name in SCHEDULE_NAMES], np.int64)[
            self.schedule
        ]
        _, which = np.unique(
            (self.pp * 2**20 + self.stages_per_rank) * 2 + vee, return_inverse=True
        )
        first = np.unique(which, return_index=True)[1]
        each = [
            compute_rank_shares(model, self.plan_at(model, i), merge_equal_ranks=merge_equal_ranks)
            for i in first.tolist()
        ]
        most = max(map(len, each), default=0)
        none = RankGroupShare(0, 0, 0, False, False)
        table = np.array([[*own, *[none] * (most - len(own))] for own in each], np.int64)
        columns = [table.reshape(len(each), most, -1)[which, :, k] for k in range(5)]
        number, rank, layers, *ends = columns
        return RankGroupShares(number, rank, layers, *(end.astype(bool) for end in ends))


def simulation_only_error() -> UsageError:
    """The refusal to tell without a simulation what offloads."""
    return UsageError(
        "closed forms know nothing of copies to the host and back: plans that offload are "
        "simulated, which exact=False, or --closed-form-only, leaves out",
        fields=["offload", "exact"],
    )


SHARED_FIELDS: Final = ("attention", "rank_order", "layers_per_stage")
COLUMN_NAMES: Final = tuple(f.name for f in fields(PlanColumns) if f.name not in SHARED_FIELDS)
