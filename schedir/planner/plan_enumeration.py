"""Enumerate all plans that a model, a cluster and a batch allow."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

import numpy as np

from schedir.errors import UsageError, describe
from schedir.ir.cost.cluster import Cluster
from schedir.ir.cost.number_parsing import MAX_SEQUENCES
from schedir.ir.cost.zero_states import ZERO_LEVEL_COUNT
from schedir.planner.estimate.schedule_formulas import (
    DEFAULT_SCHEDULES,
    SCHEDULE_FORMULAS,
    get_formulas,
)
from schedir.planner.parallel_plan import Attention, ParallelPlan, RankOrder
from schedir.planner.plan_columns import COLUMN_NAMES, RECOMPUTE_MODES, SCHEDULE_NAMES, PlanColumns
from schedir.planner.transformer.layer_division import DivisionRule, divide_layers
from schedir.planner.transformer.transformer_spec import TransformerSpec
from schedir.retired_names import suggest_name


class FieldFilter(NamedTuple):
    """The allowed values of each field of a plan. None means all useful values.

    Attributes:
        schedules: See `ParallelPlan.schedule`.
        pp: See `ParallelPlan`.
        tp: See `ParallelPlan`. None means only sizes within a node.
        dp: See `ParallelPlan`.
        stages_per_rank: See `ParallelPlan`.
        microbatch_size: See `ParallelPlan`.
        cp: See `ParallelPlan`.
        ep: See `ParallelPlan`.
        recompute: See `ParallelPlan`.
        zero: See `ParallelPlan`.
        sequence_parallel: See `ParallelPlan`.
        attention: The attention of all plans.
        rank_order: The rank order of all plans.
        division: The rule that divides the layers among stages.
        offload: True to include plans that are useful only if they offload optimizer states.
    """

    schedules: tuple[str, ...] = DEFAULT_SCHEDULES
    pp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    stages_per_rank: tuple[int, ...] | None = None
    microbatch_size: tuple[int, ...] | None = None
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    recompute: tuple[str, ...] = RECOMPUTE_MODES
    zero: tuple[int, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    attention: Attention = "softmax"
    rank_order: RankOrder = "tp-pp-dp"
    offload: bool = False
    division: DivisionRule = "even"


_DEGREE_FIELDS: Final = ("pp", "tp", "dp", "stages_per_rank", "microbatch_size", "cp", "ep")


def build_field_filter(**fields: Any) -> FieldFilter:
    """Build a filter from one value or several values for each field.

    Args:
        **fields: A value or a sequence of values for fields of `FieldFilter`. None means the
            default of the field.

    Raises:
        UsageError: A field is unknown, a value is invalid for its field, or a sequence is empty.

    Example:
        >>> build_field_filter(tp=8, schedules="zb_v").tp, build_field_filter(tp=(2, 4)).tp
        ((8,), (2, 4))
    """
    result: dict[str, Any] = {}
    for name, given in fields.items():
        if name not in FieldFilter._fields:
            hint = suggest_name(name, FieldFilter._fields) or ", ".join(FieldFilter._fields)
            raise UsageError(f"plans have no filter {name!r}", hint=hint, fields=[name])
        if name in ("attention", "rank_order", "offload", "division"):
            result[name] = given
            continue
        if given is None:
            continue
        is_sequence = isinstance(given, Sequence | range) and not isinstance(given, str)
        result[name] = tuple(given) if is_sequence else (given,)
    for name in (*_DEGREE_FIELDS, "zero", "sequence_parallel"):
        for value in result.get(name, ()):
            ParallelPlan(**{name: value})
    for name in ("recompute", "attention", "rank_order"):
        values = result.get(name, ())
        for value in values if isinstance(values, tuple) else (values,):
            ParallelPlan(**{name: value})
    for name in result.get("schedules", ()):
        get_formulas(name, "schedules")
    for name, values in result.items():
        if values == ():
            raise UsageError(f"{name} is empty: it must have at least one value", fields=[name])
    return FieldFilter(**result)


def enumerate_plans(
    model: TransformerSpec, cluster: Cluster, batch: int, field_filter: FieldFilter
) -> PlanColumns:
    """Return all plans of a model that a filter allows on a cluster.

    The product pp * tp * dp * cp is the number of GPUs, and dp * microbatch_size * microbatches is
    the batch. For fields that the filter does not restrict, these rules apply:

    - `tp` divides the heads and is at most the number of GPUs of a node.
    - There are at most as many stages as layers. If the layers are divided among `pp` stages, each
      stage except the last gets a layer. A rank has more than two stages only if the total number
      of stages divides L or L + 2. Here L is the number of layers, and 2 counts the embedding and
      the head.
    - From ZeRO level 2 on, ranks have more than two stages, and backwards are not split. With two
      stages per rank, both stages would stay unsharded. With split backwards, gradients would be
      reduced after every microbatch.
    - A pipeline of one rank has several stages only with ZeRO level 2 or 3, or to offload optimizer
      states stage by stage (`FieldFilter.offload`).

    Args:
        model: The model.
        cluster: The cluster. A plan uses all its GPUs.
        batch: The number of sequences of a step.
        field_filter: The allowed values.

    Raises:
        UsageError: No plan exists. For example, `tp` does not divide the heads, no product of
            degrees is the number of GPUs, or the batch cannot be divided among the replicas. The
            hint has values that work.

    Warns:
        A requested `tp` is more than the GPUs of a node.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MAX_SEQUENCES:
        raise UsageError(
            f"batch must be an integer from 1 to {MAX_SEQUENCES}, not {describe(batch)}",
            fields=["batch"],
        )
    degrees = [*_enumerate_degrees(model, cluster, field_filter)]
    if not degrees:
        raise _no_product_error(model, cluster, field_filter)
    if (max_tp := max(degree.tp for degree in degrees)) > cluster.gpus_per_node:
        warn_cross_node_tp(max_tp, cluster, stacklevel=5)
    rows = [
        row for degree in degrees for row in _enumerate_rows(model, batch, degree, field_filter)
    ]
    if not rows:
        raise _no_batch_error(model, batch, degrees, field_filter)
    columns = np.array(rows, np.int64).T
    return PlanColumns(**dict(zip(COLUMN_NAMES, columns, strict=True)),
                 attention=field_filter.attention, rank_order=field_filter.rank_order,
                 division=field_filter.division)  # fmt: skip


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order.

    Args:
        number: A positive integer.

    Example:
        >>> list_divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    low = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return low + [number // k for k in reversed(low) if k * k != number]


class ParallelDegrees(NamedTuple):
    """Parallel degrees that together use all GPUs.

    Attributes:
        pp: See `ParallelPlan`.
        tp: See `ParallelPlan`.
        dp: See `ParallelPlan`.
        cp: See `ParallelPlan`.
        ep: See `ParallelPlan`.
    """

    pp: int
    tp: int
    dp: int
    cp: int
    ep: int


def _enumerate_degrees(
    model: TransformerSpec, cluster: Cluster, field_filter: FieldFilter
) -> Iterator[ParallelDegrees]:
    gpus = cluster.gpu_count
    for t in _list_tp_sizes(model, cluster, field_filter):
        for p, c in product(field_filter.pp or list_divisors(gpus), field_filter.cp):
            d, remainder = divmod(gpus, p * t * c)
            if remainder or p > model.layers or (field_filter.dp and d not in field_filter.dp):
                continue
            if 0 in divide_layers(model, p, field_filter.division)[:-1]:
                continue  # A stage without layers would be idle. Only the last stage has the head.
            for e in field_filter.ep:
                if d % e == 0 and model.experts % e == 0 and model.sequence % c == 0:
                    yield ParallelDegrees(p, t, d, c, e)


def _list_tp_sizes(
    model: TransformerSpec, cluster: Cluster, field_filter: FieldFilter
) -> list[int]:
    requested, node = field_filter.tp, cluster.gpus_per_node
    sizes = [t for t in requested or list_divisors(cluster.gpu_count) if requested or t <= node]
    fits = [t for t in sizes if not _find_indivisible_field(model, t)]
    if requested and not fits:
        indivisible_field = _find_indivisible_field(model, requested[0])
        valid = [str(t) for t in range(1, node + 1) if not _find_indivisible_field(model, t)]
        size = getattr(model, indivisible_field)
        raise UsageError(
            f"tp {requested[0]} does not divide {indivisible_field} {size}",
            hint=f"tp = {' or '.join(valid)}",
            fields=["tp", indivisible_field],
        )
    return fits


def warn_cross_node_tp(t: int, cluster: Cluster, *, stacklevel: int) -> None:
    """Warn that a tensor-parallel group is larger than a node.

    Args:
        t: The tensor-parallel size.
        cluster: The cluster.
        stacklevel: The number of stack frames from the caller of this function to the line that the
            warning shows.
    """
    warnings.warn(
        f"tp {t} is more than the {cluster.gpus_per_node} GPUs of a node, so the tensor-parallel "
        "collectives of each layer use the network between nodes",
        stacklevel=stacklevel + 1,
    )


def _find_indivisible_field(model: TransformerSpec, t: int) -> str:
    """Return the name of the first size of the model that `t` ranks cannot share, or ""."""
    kv = model.kv_heads % t and t % model.kv_heads
    indivisible = [name for name in ("heads", "ffn") if getattr(model, name) % t]
    return (indivisible + ["kv_heads"] * bool(kv) + [""])[0]


def _list_stages_per_rank(
    model: TransformerSpec, p: int, schedule: str, field_filter: FieldFilter
) -> list[int]:
    kind = SCHEDULE_FORMULAS[schedule].stages_per_rank
    max_stages = model.layers // p
    if kind != "many":
        v = 1 if kind == "one" else 2
        return [v] * (
            v <= max_stages
            and (not field_filter.stages_per_rank or v in field_filter.stages_per_rank)
        )
    if field_filter.stages_per_rank:
        return [v for v in field_filter.stages_per_rank if 2 <= v <= max_stages]
    even = [v for v in range(2, max_stages + 1) if model.layers % (p * v) == 0]
    ends = [v for v in range(2, max_stages + 1) if (model.layers + 2) % (p * v) == 0 and p > 1]
    return sorted({*even, *ends} | ({2} if max_stages >= 2 else set()))


def _enumerate_rows(
    model: TransformerSpec, batch: int, degree: ParallelDegrees, field_filter: FieldFilter
) -> Iterator[tuple[int, ...]]:
    """Yield the plans of given degrees, as rows in the order of `COLUMN_NAMES`."""
    p, t, d, c, e = degree
    if batch % d:
        return
    replica_batch = batch // d
    sizes = [
        b
        for b in field_filter.microbatch_size or list_divisors(replica_batch)
        if replica_batch % b == 0
    ]
    sequence_parallel = field_filter.sequence_parallel or (False, True)
    sequence_parallel = tuple(
        {cut and t > 1 and model.sequence % (t * c) == 0 for cut in sequence_parallel}
    )
    recomputes = [RECOMPUTE_MODES.index(name) for name in field_filter.recompute]
    for name in field_filter.schedules:
        formulas = SCHEDULE_FORMULAS[name]
        for v in _list_stages_per_rank(model, p, name, field_filter):
            levels = [*_list_zero_levels(d * c, p, v, name, field_filter)]
            combinations = [*product(levels, recomputes, sequence_parallel)]
            for b in sizes:
                m = replica_batch // b
                if m < formulas.min_microbatches(p) or (formulas.needs_multiple_of_ranks and m % p):
                    continue
                number = SCHEDULE_NAMES.index(name)
                for zero, recompute, cut in combinations:
                    yield p, t, d, v, b, m, number, recompute, zero, int(cut), c, e


def _list_zero_levels(
    replicas: int, p: int, v: int, schedule: str, field_filter: FieldFilter
) -> Iterator[int]:
    """Yield the ZeRO levels that are useful with these degrees and this schedule."""
    for level in field_filter.zero or range(ZERO_LEVEL_COUNT):
        shards_gradients = level >= 2 and (
            field_filter.zero is not None
            or (v > 2 and not SCHEDULE_FORMULAS[schedule].has_split_backward)
        )
        # On a single rank, several stages are useful only for ZeRO 2 and 3 and for offloaded
        # states. Several stages are also allowed if the filter has both `stages_per_rank` and
        # `zero`.
        allows_many_stages = (
            field_filter.stages_per_rank is not None and field_filter.zero is not None
        )
        allows_many_stages = allows_many_stages or (
            field_filter.offload and SCHEDULE_FORMULAS[schedule].stages_per_rank == "many"
        )
        is_excluded = p == 1 and schedule != "one_f_one_b" and not allows_many_stages
        if replicas == 1:
            if level == 0 and not is_excluded:
                yield level
        elif shards_gradients or (level < 2 and not is_excluded):
            yield level


def _no_product_error(
    model: TransformerSpec, cluster: Cluster, field_filter: FieldFilter
) -> UsageError:
    names = [
        name
        for name in ("pp", "tp", "dp", "cp", "ep")
        if getattr(field_filter, name) not in (None, (1,))
    ]
    product_text = " x ".join(
        f"{name} {_join_with_or(getattr(field_filter, name))}" for name in names
    )
    if field_filter.pp and min(field_filter.pp) > model.layers:
        return UsageError(
            f"pp {_join_with_or(field_filter.pp)} exceeds the {model.layers} layers of the model",
            fields=["pp"],
        )
    for name, total_field in (("ep", "experts"), ("cp", "sequence")):
        size = getattr(model, total_field)
        parts = getattr(field_filter, name)
        if all(size % part for part in parts):
            return UsageError(
                f"{name} {_join_with_or(parts)} does not divide {total_field} {size}",
                fields=[name, total_field],
            )
    return UsageError(
        f"no plan with {product_text} uses all {cluster.gpu_count} GPUs",
        hint="the product of pp, tp, dp and cp must be "
        f"{cluster.gpu_count} = {' x '.join(map(str, _factorize(cluster.gpu_count)))}"
        f"{', and ep must divide dp' if 'ep' in names else ''}",
        fields=names,
    )


def _join_with_or(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))


def _factorize(number: int) -> list[int]:
    factors, k = [], 2
    while number > 1:
        while number % k == 0:
            factors.append(k)
            number //= k
        k += 1
    return factors or [1]


def _no_batch_error(
    model: TransformerSpec, batch: int, degrees: list[ParallelDegrees], field_filter: FieldFilter
) -> UsageError:
    """Return the error for a batch that no plan can use, with the nearest batches that work.

    If the batch is not the reason, the error names stages_per_rank, schedules and zero.
    """
    near_batches = set[int]()
    for degree in degrees:
        for name in field_filter.schedules:
            if not _list_stages_per_rank(model, degree.pp, name, field_filter):
                continue
            formulas = SCHEDULE_FORMULAS[name]
            for b in field_filter.microbatch_size or (1,):
                unit = degree.dp * b * (degree.pp if formulas.needs_multiple_of_ranks else 1)
                min_batch = degree.dp * b * int(formulas.min_microbatches(degree.pp))
                min_batch = -(-min_batch // unit) * unit
                near_batches |= {
                    max(batch // unit * unit, min_batch),
                    max(-(-batch // unit) * unit, min_batch),
                }
    candidates = sorted(near_batches - {batch})
    if not candidates or batch in near_batches:
        return UsageError(
            f"no plan of {model.layers} layers has the requested stages_per_rank, schedules and "
            "zero", fields=["stages_per_rank", "schedules", "zero"],
        )  # fmt: skip
    below = [size for size in candidates if size < batch][-1:]
    above = [size for size in candidates if size > batch][:1]
    replicas = sorted({degree.dp for degree in degrees})
    sizes = (
        f" and microbatch_size {_join_with_or(field_filter.microbatch_size)}"
        if field_filter.microbatch_size
        else ""
    )
    return UsageError(
        f"batch {batch} does not fit any plan with dp {_join_with_or(replicas)}{sizes}",
        hint=f"the nearest batches that fit: {' and '.join(map(str, below + above))}",
        fields=["batch", "dp"],
    )
