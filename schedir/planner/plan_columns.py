"""Represent many plans as a table with one column for each field of a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from schedir.errors import CommandHint, UsageError
from schedir.planner.estimate.schedule_formulas import SCHEDULE_FORMULAS
from schedir.planner.parallel_plan import Attention, ParallelPlan, RankOrder
from schedir.planner.transformer.layer_division import (
    DivisionRule,
    RankGroupShare,
    compute_rank_shares,
    divide_layers,
)
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.predict.layer_activation_bytes import Recompute

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SCHEDULE_NAMES: Final = tuple(SCHEDULE_FORMULAS)  # The column `schedule` has indices of this tuple.
RECOMPUTE_MODES: Final[tuple[Recompute, ...]] = get_args(Recompute)


class RankGroupShares(NamedTuple):
    """The layers, the embedding and the head on each rank group of each plan.

    A rank group is a group of ranks with equal shares of the model. The fields are the fields of
    `RankGroupShare`, as arrays of shape (plans, groups). A plan with fewer groups has entries with
    a `rank_count` of 0.

    Attributes:
        rank_count: The number of ranks of the group.
        first_rank: The first rank of the group.
        layers: The number of layers of each rank of the group.
        has_first_stage: True if the ranks have the first stage, and so the embedding.
        has_last_stage: True if the ranks have the last stage, and so the head.
    """

    rank_count: Ints
    first_rank: Ints
    layers: Ints
    has_first_stage: NDArray[np.bool_]
    has_last_stage: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PlanColumns:
    """Plans as columns: an integer array of shape (plans,) for each field of a plan.

    Args:
        pp: See `ParallelPlan`.
        tp: See `ParallelPlan`.
        dp: See `ParallelPlan`.
        stages_per_rank: See `ParallelPlan`.
        microbatch_size: See `ParallelPlan`.
        microbatches: See `ParallelPlan`.
        schedule: Indices of `SCHEDULE_NAMES`.
        recompute: Indices of `RECOMPUTE_MODES`.
        zero: See `ParallelPlan`.
        sequence_parallel: 0 or 1.
        cp: See `ParallelPlan`.
        ep: See `ParallelPlan`.
        attention: The attention of all plans.
        rank_order: The rank order of all plans.
        layers_per_stage: The division of layers of all plans. () means the rule `division`.
        division: The rule that divides the layers if `layers_per_stage` is ().
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
    division: DivisionRule = "even"

    def __len__(self) -> int:
        return len(self.pp)

    @classmethod
    def from_plan(cls, plan: ParallelPlan) -> PlanColumns:
        """Return a table of one plan.

        Args:
            plan: The plan.

        Raises:
            UsageError: The plan offloads. The closed form does not include copies to the host.
        """
        if plan.has_offload:
            raise simulation_only_error()
        columns = {f.name: getattr(plan, f.name) for f in fields(cls) if f.name != "division"}
        columns["schedule"] = SCHEDULE_NAMES.index(plan.schedule)
        columns["recompute"] = RECOMPUTE_MODES.index(plan.recompute)
        columns |= {name: np.array([int(columns[name])]) for name in COLUMN_NAMES}
        return cls(**columns)

    def select(self, selection: Any) -> PlanColumns:
        """Return a table of some of the plans.

        Args:
            selection: An index array or a mask of shape (plans,).
        """
        return replace(self, **{name: getattr(self, name)[selection] for name in COLUMN_NAMES})

    def plan_at(self, model: TransformerSpec, index: int) -> ParallelPlan:
        """Return one of the plans.

        Args:
            model: The model of the plans.
            index: The index of the plan in the columns.

        Returns:
            The plan. It has explicit `layers_per_stage`, unless the rule "even" gives every stage
            the same number of layers.
        """
        values: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in COLUMN_NAMES}
        values["schedule"] = SCHEDULE_NAMES[values["schedule"]]
        values["recompute"] = RECOMPUTE_MODES[values["recompute"]]
        values["sequence_parallel"] = bool(values["sequence_parallel"])
        values |= {name: getattr(self, name) for name in SHARED_FIELDS}
        stages = values["pp"] * values["stages_per_rank"]
        if not self.layers_per_stage and (self.division != "even" or model.layers % stages):
            values["layers_per_stage"] = divide_layers(model, stages, self.division)
        return ParallelPlan(**values)

    def find_distinct(self, *column_names: str) -> tuple[Ints, Ints]:
        """Find the distinct combinations of values in some columns.

        Args:
            *column_names: The names of the columns.

        Returns:
            The index of the first plan with each combination, and for each plan the index of its
            combination.
        """
        code = np.zeros(len(self), np.int64)
        for name in column_names:
            column = getattr(self, name)
            code = code * (int(column.max(initial=0)) + 1) + column
        _, first_rows, row_of_plan = np.unique(code, return_index=True, return_inverse=True)
        return first_rows, row_of_plan

    def get_formula_column(self, name: str) -> NDArray[Any]:
        """Return an attribute of `ScheduleFormulas` for the schedule of each plan.

        Args:
            name: The name of the attribute.
        """
        values = [getattr(formulas, name) for formulas in SCHEDULE_FORMULAS.values()]
        return np.array(values)[self.schedule]

    def compute_shares(
        self, model: TransformerSpec, *, merge_equal_ranks: bool = True
    ) -> RankGroupShares:
        """Return the layers, the embedding and the head on each rank group of each plan.

        Args:
            model: The model of the plans.
            merge_equal_ranks: True if ranks with equal shares form one group. Otherwise each rank
                is a group.
        """
        _, combination = np.unique(
            (self.pp * 2**20 + self.stages_per_rank) * 2 + self.get_formula_column("is_vee"),
            return_inverse=True,
        )
        first_rows = np.unique(combination, return_index=True)[1]
        groups_of_plans = [
            compute_rank_shares(model, self.plan_at(model, i), merge_equal_ranks=merge_equal_ranks)
            for i in first_rows.tolist()
        ]
        max_groups = max(map(len, groups_of_plans), default=0)
        no_group = RankGroupShare(0, 0, 0, False, False)
        table = np.array(
            [[*groups, *[no_group] * (max_groups - len(groups))] for groups in groups_of_plans],
            np.int64,
        )
        columns = [
            table.reshape(len(groups_of_plans), max_groups, -1)[combination, :, k] for k in range(5)
        ]
        number, rank, layers, *ends = columns
        return RankGroupShares(number, rank, layers, *(end.astype(bool) for end in ends))


def simulation_only_error() -> UsageError:
    """Return the error for a plan that offloads, which the closed form cannot estimate."""
    return UsageError(
        "closed forms cannot estimate plans with offload: these plans need a simulation",
        hint=CommandHint(
            "closed_form_only=False; simulate_plan estimates one such plan",
            "leave out --closed-form-only",
        ),
        fields=["offload", "closed_form_only"],
    )


SHARED_FIELDS: Final = ("attention", "rank_order", "layers_per_stage")
COLUMN_NAMES: Final = tuple(
    f.name for f in fields(PlanColumns) if f.name not in (*SHARED_FIELDS, "division")
)
