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
from schedir.planner.transformer.transformer_spec import TransformerSpec


class FieldFilter(NamedTuple):
    """Which values of each field of a choice are asked for; None for all that make sense."""

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
    offload: bool = False  # whether there are plans that make sense only where states are moved


_DEGREE_FIELDS: Final = ("pp", "tp", "dp", "stages_per_rank", "microbatch_size", "cp", "ep")


def build_field_filter(**fields: Any) -> FieldFilter:
    """What is asked for, of one value or several each.

    Raises UsageError for what is no such value.

    >>> build_field_filter(tp=8, schedules="zb_v").tp, build_field_filter(tp=(2, 4)).tp
    ((8,), (2, 4))
    """
    found: dict[str, Any] = {}
    for name, given in fields.items():
        if name in ("attention", "rank_order", "offload"):
            found[name] = given
            continue
        if given is None:
            continue
        several = isinstance(given, Sequence | range) and not isinstance(given, str)
        found[name] = tuple(given) if several else (given,)
    for name in _DEGREE_FIELDS:
        for value in found.get(name, ()):
            ParallelPlan(**{name: value})
    for name in ("recompute", "attention", "rank_order"):
        values = found.get(name, ())
        for value in values if isinstance(values, tuple) else (values,):
            ParallelPlan(**{name: value})
    for level in found.get("zero", ()):
        if (
            isinstance(level, bool)
            or not isinstance(level, int)
            or not 0 <= level < ZERO_LEVEL_COUNT
        ):
            raise UsageError(
                f"zero is a level of ZeRO, from 0 to {ZERO_LEVEL_COUNT - 1}, not {describe(level)}",
                fields=["zero"],
            )
    for value in found.get("sequence_parallel", ()):
        if not isinstance(value, bool):
            raise UsageError(
                f"sequence_parallel is True or False, not {describe(value)}",
                fields=["sequence_parallel"],
            )
    for name in found.get("schedules", ()):
        get_formulas(name)
    for name, values in found.items():
        if values == ():
            raise UsageError(f"of {name} there is none to choose from", fields=[name])
    return FieldFilter(**found)


def enumerate_plans(
    model: TransformerSpec, cluster: Cluster, batch: int, field_filter: FieldFilter
) -> PlanColumns:
    """All plans of what is asked for.

    p t d c are all GPUs of the cluster, d b m is the batch.  Slices divide the heads, stay within
    a node unless `tp` is given, and then there is a warning; stages are no more than layers, and
    where these do not divide evenly, two stages per rank at most, or as many as would divide them
    with the embedding and the head.  With the weights or gradients in parts (`zero` from 2 on)
    ranks have more than two stages, and whole backwards, unless told: all stages are whole all the
    time otherwise, or gradients are summed again and again.  Ranks that are alone have more than
    one for that, too, and where states are to be moved to the host, stage by stage (`offload`).

    Raises UsageError where there is none: for heads that slices do not divide, GPUs that are no
    product of what is asked for, and a batch that does not divide, with the nearest that do.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise UsageError(f"batch is a number of sequences, not {describe(batch)}", fields=["batch"])
    if batch > MAX_SEQUENCES:
        raise UsageError(
            f"batch is {describe(batch)}; it must be at most {MAX_SEQUENCES}", fields=["batch"]
        )
    degrees = [*_enumerate_degrees(model, cluster, field_filter)]
    if not degrees:
        raise _no_product_error(model, cluster, field_filter)
    if (most := max(degree.tp for degree in degrees)) > cluster.gpus_per_node:
        warn_cross_node_tp(most, cluster, stacklevel=4)
    rows = [
        row for degree in degrees for row in _enumerate_rows(model, batch, degree, field_filter)
    ]
    if not rows:
        raise _no_batch_error(model, batch, degrees, field_filter)
    columns = np.array(rows, np.int64).T
    return PlanColumns(**dict(zip(COLUMN_NAMES, columns, strict=True)),
                 attention=field_filter.attention, rank_order=field_filter.rank_order)  # fmt: skip


def list_divisors(number: int) -> list[int]:
    """Of a number, ascending.

    >>> list_divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return low + [number // k for k in reversed(low) if k * k != number]


class Degree(NamedTuple):
    """How many of each make the GPUs."""

    pp: int
    tp: int
    dp: int
    cp: int
    ep: int


def _enumerate_degrees(
    model: TransformerSpec, cluster: Cluster, field_filter: FieldFilter
) -> Iterator[Degree]:
    gpus = cluster.gpu_count
    for t in _list_tp_sizes(model, cluster, field_filter):
        for p, c in product(field_filter.pp or list_divisors(gpus), field_filter.cp):
            d, left = divmod(gpus, p * t * c)
            if left or p > model.layers or (field_filter.dp and d not in field_filter.dp):
                continue
            for e in field_filter.ep:
                if d % e == 0 and model.experts % e == 0 and model.sequence % c == 0:
                    yield Degree(p, t, d, c, e)


def _list_tp_sizes(
    model: TransformerSpec, cluster: Cluster, field_filter: FieldFilter
) -> list[int]:
    """The numbers of slices that the model allows."""
    told, node = field_filter.tp, cluster.gpus_per_node
    found = [t for t in told or list_divisors(cluster.gpu_count) if told or t <= node]
    fits = [t for t in found if not _find_indivisible_field(model, t)]
    if told and not fits:
        wrong = _find_indivisible_field(model, told[0])
        can = [str(t) for t in range(1, node + 1) if not _find_indivisible_field(model, t)]
        raise UsageError(
            f"{wrong} {getattr(model, wrong)} cannot be divided among tp {told[0]}",
            hint=f"tp = {' or '.join(can)}", fields=["tp", wrong],
        )  # fmt: skip
    return fits


def warn_cross_node_tp(t: int, cluster: Cluster, *, stacklevel: int) -> None:
    """Warn of slices that are no neighbours."""
    warnings.warn(
        f"tp {t} leaves the node of {cluster.gpus_per_node} GPUs: each layer's sums go over the "
        "network",
        stacklevel=stacklevel + 1,
    )


def _find_indivisible_field(model: TransformerSpec, t: int) -> str:
    """What of a model t slices do not divide."""
    kv = model.kv_heads % t and t % model.kv_heads
    bad = [name for name in ("heads", "ffn") if getattr(model, name) % t]
    return (bad + ["kv_heads"] * bool(kv) + [""])[0]


def _list_stages_per_rank(
    model: TransformerSpec, p: int, schedule: str, field_filter: FieldFilter
) -> list[int]:
    """Stages per rank of a schedule."""
    kind = SCHEDULE_FORMULAS[schedule].stages_per_rank
    most = model.layers // p
    if kind != "many":
        v = 1 if kind == "one" else 2
        return [v] * (
            v <= most and (not field_filter.stages_per_rank or v in field_filter.stages_per_rank)
        )
    if field_filter.stages_per_rank:
        return [v for v in field_filter.stages_per_rank if 2 <= v <= most]
    even = [v for v in range(2, most + 1) if model.layers % (p * v) == 0]
    ends = [v for v in range(2, most + 1) if (model.layers + 2) % (p * v) == 0 and p > 1]
    return sorted({*even, *ends} | ({2} if most >= 2 else set()))


def _enumerate_rows(
    model: TransformerSpec, batch: int, degree: Degree, field_filter: FieldFilter
) -> Iterator[tuple[int, ...]]:
    """The plans of so many ranks, slices and replicas, as columns have them."""
    p, t, d, c, e = degree
    if batch % d:
        return
    each = batch // d
    sizes = [b for b in field_filter.microbatch_size or list_divisors(each) if each % b == 0]
    cuts = field_filter.sequence_parallel or (False, True)
    cuts = tuple({cut and t > 1 and model.sequence % (t * c) == 0 for cut in cuts})
    recomputes = [RECOMPUTE_MODES.index(name) for name in field_filter.recompute]
    for name in field_filter.schedules:
        own = SCHEDULE_FORMULAS[name]
        for v in _list_stages_per_rank(model, p, name, field_filter):
            levels = [*_list_zero_levels(d * c, p, v, name, field_filter)]
            rest = [*product(levels, recomputes, cuts)]
            for b in sizes:
                m = each // b
                if m < own.min_microbatches(p) or (own.needs_multiple_of_ranks and m % p):
                    continue
                number = SCHEDULE_NAMES.index(name)
                for zero, recompute, cut in rest:
                    yield p, t, d, v, b, m, number, recompute, zero, int(cut), c, e


def _list_zero_levels(
    replicas: int, p: int, v: int, schedule: str, field_filter: FieldFilter
) -> Iterator[int]:
    """Levels of ZeRO that differ from lower ones."""
    for level in field_filter.zero or range(ZERO_LEVEL_COUNT):
        cuts = level >= 2 and (
            field_filter.zero is not None
            or (v > 2 and not SCHEDULE_FORMULAS[schedule].has_split_backward)
        )
        # Many stages on one rank are for ZeRO alone, and for states on the host, unless told.
        told = field_filter.stages_per_rank is not None and field_filter.zero is not None
        told = told or (
            field_filter.offload and SCHEDULE_FORMULAS[schedule].stages_per_rank == "many"
        )
        alone = p == 1 and schedule != "one_f_one_b" and not told
        if replicas == 1:
            if level == 0 and not alone:
                yield level
        elif cuts or (level < 2 and not alone):
            yield level


def _no_product_error(
    model: TransformerSpec, cluster: Cluster, field_filter: FieldFilter
) -> UsageError:
    told = [
        name
        for name in ("pp", "tp", "dp", "cp", "ep")
        if getattr(field_filter, name) not in (None, (1,))
    ]
    said_ = " x ".join(f"{name} {_join_with_or(getattr(field_filter, name))}" for name in told)
    if field_filter.pp and min(field_filter.pp) > model.layers:
        return UsageError(
            f"pp {_join_with_or(field_filter.pp)} are more ranks than the model has layers, "
            f"{model.layers}",
            fields=["pp"],
        )
    for name, whole in (("ep", "experts"), ("cp", "sequence")):
        size, parts = getattr(model, whole), getattr(field_filter, name)
        if all(size % each for each in parts):
            return UsageError(
                f"{whole} {size} cannot be divided among {name} {_join_with_or(parts)}",
                fields=[name, whole],
            )
    return UsageError(
        f"{cluster.gpu_count} GPUs are no product of {said_} and something else",
        hint=f"{cluster.gpu_count} = {' x '.join(map(str, _factorize(cluster.gpu_count)))}",
        fields=told,
    )


def _join_with_or(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))


def _factorize(number: int) -> list[int]:
    found, k = [], 2
    while number > 1:
        while number % k == 0:
            found.append(k)
            number //= k
        k += 1
    return found or [1]


def _no_batch_error(
    model: TransformerSpec, batch: int, degrees: list[Degree], field_filter: FieldFilter
) -> UsageError:
    """The nearest batches of which there are plans; or what else is in the way."""
    near = set[int]()
    for degree in degrees:
        for name in field_filter.schedules:
            if not _list_stages_per_rank(model, degree.pp, name, field_filter):
                continue
            own = SCHEDULE_FORMULAS[name]
            for b in field_filter.microbatch_size or (1,):
                unit = degree.dp * b * (degree.pp if own.needs_multiple_of_ranks else 1)
                least = degree.dp * b * int(own.min_microbatches(degree.pp))
                least = -(-least // unit) * unit
                near |= {
                    max(batch // unit * unit, least),
                    max(-(-batch // unit) * unit, least),
                }
    can = sorted(near - {batch})
    if not can or batch in near:
        return UsageError(
            f"no plan of {model.layers} layers is as asked: stages, schedules and levels of ZeRO "
            "do not go together", fields=["stages_per_rank", "schedules", "zero"],
        )  # fmt: skip
    below = [size for size in can if size < batch][-1:]
    above = [size for size in can if size > batch][:1]
    replicas = sorted({degree.dp for degree in degrees})
    sizes = (
        f" of microbatches of {_join_with_or(field_filter.microbatch_size)}"
        if field_filter.microbatch_size
        else ""
    )
    return UsageError(
        f"a batch of {batch} does not divide among dp {_join_with_or(replicas)} replicas{sizes}",
        hint=f"the nearest that do: {' and '.join(map(str, below + above))}",
        fields=["batch", "dp"],
    )
