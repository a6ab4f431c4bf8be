"""Measure ZeRO: equality of each level with level 0, memory to the byte, and gathers of weights.

    python benchmarks/zero.py                    # all tables
    python benchmarks/zero.py bits [NAME ...]    # cases whose names begin with NAME, or all
    python benchmarks/zero.py bytes [NAME ...]
    python benchmarks/zero.py gathers [--ranks 4] [--microbatches 16] [--stages-per-rank 4]

- `bits`: each case trains a GPT with a tied embedding and gradient clipping for five steps of AdamW
  over Gloo, once for each level. Parameters, moments and losses of levels 1 to 3 must be bitwise
  equal to those of plain data parallelism.
- `bytes`: each row runs a program of a small GPT over Gloo with AdamW. In some rows, the optimizer
  state is on the host. After each instruction of the second step, each process adds the bytes of
  all live tensors: tensors of Python objects, and results of operations that autograd keeps. Each
  storage counts once, with its current size. Messages, the batch, losses, norms and flags do not
  count. The sum must equal the prediction for this instruction, to the byte.
- `gathers`: the table has a row for each schedule with several stages per rank and each number of
  unsharded stages. It counts the gathers of each rank without prefetch (the fewest possible), with
  a prefetch of one stage (the default), and in torch's `_add_unshard_reshard` with at most as many
  unsharded stages. One number means that all ranks have the same count. The times are those of a
  predicted step without prefetch, with prefetch, and with gathers that take no time. Their unit is
  the time of a forward: B takes 2, I and W 1, a message 0.05 and a gather 0.5. A second table
  counts the reductions of each rank, at the end of a step and after each backward, and the bytes
  that a process sends for them.

The exit code is 1 if a value or a number of bytes differs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from schedir.runtime.executor_options import ExecutionOptions, GradientOptions

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import schedir
from benchmarks.harness import parse, print_header, print_row
from schedir import Costs, PipelineShape, Program, Sizes, compile, schedules, simulate
from schedir.analysis.memory.footprint import Footprint, compute_footprints
from schedir.analysis.memory.unshard_counts import count_unshards
from schedir.commands.simulate import count_sent_bytes
from schedir.errors import ShapeError
from schedir.ir.isa.instructions import BOUNDARY_VALUES, Lane
from schedir.models import gpt
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.boundaries.size_measurement import measure_sizes
from schedir.runtime.executor import Executor
from schedir.runtime.parameters.mixed_precision import MainOptimizer, use_float32_gradients
from schedir.runtime.program_state import Call
from schedir.runtime.services.loss_gradients import LossGradients
from schedir.runtime.services.message_buffers import MessageBuffers
from schedir.runtime.services.optimizer_placement import OptimizerPlacement
from schedir.runtime.services.pending_sends import PendingSends
from schedir.runtime.services.update_checks import UpdateChecks
from schedir.schedules.schedule_algebra import get_placement_mark, has_free_v
from schedir.schedules.schedule_expansion import expand_schedule
from schedir.transports.gloo import GlooTransport
from tests.cpu.gloo_processes import run as run_processes

STEPS, BATCH, CONTEXT, HIDDEN, VOCAB = 5, 2, 8, 24, 31
COSTS = Costs(F=1, I=1, W=1, send=0.05, unshard=0.5)
TensorShards = dict[tuple[int, int, str, str], list[tuple[int, torch.Tensor]]]
_MESSAGES = {kind.name.lower() for kind in BOUNDARY_VALUES} | {"handed_over"}


# ------------------------------------------------------------ bits


class Case(NamedTuple):
    """A case of `bits`: a schedule, its shape, the parallel sizes, and the precision."""

    schedule: Any
    shape: PipelineShape
    dp: int = 2
    tp: int = 1
    half: bool = False
    options: Any = ()
    folder: str | None = None  # the directory for values on the disk

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.shape.ranks * self.dp * self.tp


def list_cases() -> dict[str, Case]:
    """Return all cases by name."""
    case_by_name = {}
    for schedule, shape in (
        (schedir.schedules.one_f_one_b, PipelineShape(2, 3)),
        (schedir.schedules.interleaved, PipelineShape(2, 4, 2)),
        (schedir.schedules.looped_bfs, PipelineShape(2, 3, 2)),
        (schedir.schedules.zb_h1, PipelineShape(2, 4)),
        (schedir.schedules.dualpipe, PipelineShape(2, 4, placement="mirror")),
    ):
        for dp, tp, half in (
            (2, 1, False),
            (3, 1, False),
            (2, 1, True),
            (3, 1, True),
            (2, 2, False),
        ):
            name = f"{schedule.__name__} dp{dp}" + " tp2" * (tp == 2) + " bf16" * half
            case_by_name[name] = Case(schedule, shape, dp, tp, half)
    return case_by_name


def build_stages(case: Case, rank_stages: Any, tp: Any) -> dict[int, nn.Module]:
    """Return the stages of a rank of a GPT with a tied embedding."""
    cfg = gpt.GPTConfig(
        vocab=VOCAB,
        layers=case.shape.stages,
        hidden=HIDDEN,
        heads=2,
        context=CONTEXT,
        tied=case.shape.stages > 1,
    )
    stages: dict[int, nn.Module] = {}
    for s in rank_stages:
        stages[s] = gpt.build_stage(cfg, s, case.shape.stages, tp=tp)
        if case.half:
            use_float32_gradients(stages[s].bfloat16())
    return stages


def train(rank: int, case: Case, zero: int, steps: int = STEPS) -> tuple[list[bytes], TensorShards]:
    """Train as one process. Return losses, norms, and its shards of parameters and moments."""
    torch.manual_seed(0)
    options = {k: v for k, v in dict(case.options).items() if k != "unsharded_stages" or zero == 3}
    program = schedir.compile(
        case.schedule, case.shape, dp=case.dp, tp=case.tp, zero=zero,
        **{"clip_grad_norm": True, "tied_weights": case.shape.stages > 1} | options,
    )  # fmt: skip
    transport = GlooTransport(program)
    tp = transport.tp_group
    stages = build_stages(case, program.shape.stages_on_rank[transport.rank], tp)
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer: Any
    if case.half:
        optimizer = MainOptimizer(parameters, lambda main: torch.optim.AdamW(main, 1e-2))
    else:
        optimizer = torch.optim.AdamW(parameters, 1e-2)
    executor = Executor(
        program,
        transport.rank,
        stages,
        transport,
        loss=lambda y, target: gpt.loss(y, target, tp=tp),
        boundary=Boundary((BATCH, CONTEXT, HIDDEN), torch.bfloat16 if case.half else torch.float32),
        optimizer=optimizer,
        gradients=GradientOptions(max_norm=0.05 if program.clip_grad_norm else None),
        execution=ExecutionOptions(spill_dir=case.folder),
    )
    m, numbers = case.shape.microbatches, torch.Generator().manual_seed(1)
    results: list[bytes] = []
    for _ in range(steps):
        x, y = torch.randint(0, VOCAB, (2, m * case.dp, BATCH, CONTEXT), generator=numbers)
        replica_batch = slice(transport.dp_rank * m, (transport.dp_rank + 1) * m)
        total = executor.step(x[replica_batch], y[replica_batch], 1 / y.numel())
        results += [t.numpy().tobytes() for t in (total, executor.grad_norm) if t is not None]
    return results, collect_shards(executor, optimizer, transport)


def collect_shards(executor: Executor, optimizer: Any, transport: Any) -> TensorShards:
    """Return the shards of parameters, gradients and moments of a process, with their offsets."""
    shards: TensorShards = {}
    main_parameters = dict(
        zip(
            getattr(optimizer, "parameters", ()),
            getattr(optimizer, "main_parameters", ()),
            strict=True,
        )
    )
    state = getattr(optimizer, "inner", optimizer).state
    for s, stage in executor.stages.items():
        begin_offsets: dict[nn.Parameter, int] = {}
        for bucket in stage.sharded_parameters.buckets:
            ranges = bucket.list_shard_ranges(transport.dp_rank)
            begin_offsets |= {p: r[0] for p, r in zip(bucket.parameters, ranges, strict=True)}
        for name, p in stage.module.named_parameters():
            tensors = {
                "p": p.detach(),
                "grad": p.grad,
                "main": main_parameters.get(p),
                **state.get(main_parameters.get(p, p), {}),
            }
            for kind, value in tensors.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel():
                    key = (s, transport.rank * transport.tp + transport.tp_rank, name, kind)
                    flat = value.detach().reshape(-1).clone()
                    shards.setdefault(key, []).append((begin_offsets.get(p, 0), flat))
    return shards


def join_shards(process_results: list[tuple[list[bytes], TensorShards]]) -> dict[Any, torch.Tensor]:
    """Join the shards of all processes into full tensors, by name."""
    shards_by_tensor: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    for _, shards in process_results:
        for key, tensor_shards in shards.items():
            shards_by_tensor.setdefault(key, []).extend(tensor_shards)
    result = {}
    for key, tensor_shards in shards_by_tensor.items():
        size = max(begin + t.numel() for begin, t in tensor_shards)
        result[key] = torch.full((size,), torch.nan, dtype=tensor_shards[0][1].dtype)
        for begin, t in tensor_shards:
            target = result[key][begin : begin + t.numel()]
            # Replicas must have equal shards.
            assert torch.equal(target[~target.isnan()], t[~target.isnan()]), key
            target.copy_(t)
    return result


def run_case(case: Case, zero: int) -> list[tuple[list[bytes], TensorShards]]:
    """Return the results of each process of a run."""
    return run_processes(train, case.processes, case, zero, limit=300)


def find_differences(plain: Any, *others: Any) -> list[str]:
    """Return the differences between the results of other runs and those of a plain run."""
    expected, differences = join_shards(plain), []
    for zero, sharded in enumerate(others, 1):
        if [values for values, _ in sharded] != [values for values, _ in plain]:
            differences.append(f"zero {zero}: losses or norms")
        tensors = join_shards(sharded)
        differences += [
            f"zero {zero}: only in one: {key}" for key in sorted(tensors.keys() ^ expected.keys())
        ]
        differences += [
            f"zero {zero}: {key}"
            for key in sorted(tensors.keys() & expected.keys())
            if not torch.equal(tensors[key], expected[key])
        ]
    return differences


def compare_bits(options: argparse.Namespace) -> int:
    """Compare the levels in each case. Return the number of cases that differ."""
    print_header("case", "processes", "zero 1, 2, 3 against 0")
    differing_cases = 0
    for name, case in select_by_name(list_cases(), options.names):
        differences = find_differences(*(run_case(case, zero) for zero in range(4)))
        differing_cases += bool(differences)
        print_row(name, case.processes, "; ".join(differences) or "the same bits")
    return differing_cases


def select_by_name(entries: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the entries with a name that begins with one of `names`, or all without `names`."""
    for name, entry in entries.items():
        if not names or any(name.startswith(prefix) for prefix in names):
            yield name, entry


# ------------------------------------------------------------ bytes


class ByteRow(NamedTuple):
    """A row of `bytes`: a schedule, a shape, and memory options."""

    schedule: Any
    shape: PipelineShape
    zero: int
    recompute: bool
    dp: int = 2
    reduce: str = "update_end"
    states: str = "device"


class Measurement(NamedTuple):
    """The measurements of one process.

    Attributes:
        comparisons: The number of comparisons.
        differences: The instruction, the live bytes and the predicted bytes of each difference.
        peak_bytes: The peak of the live bytes.
    """

    comparisons: int
    differences: list[tuple[str, int, float]]
    peak_bytes: int


def list_byte_rows() -> dict[str, ByteRow]:
    """Return all rows by name."""
    row_by_name = {}
    for schedule, shape in (
        (schedir.schedules.one_f_one_b, PipelineShape(2, 3)),
        (schedir.schedules.interleaved, PipelineShape(2, 4, 2)),
        (schedir.schedules.looped_bfs, PipelineShape(1, 3, 4)),
        (schedir.schedules.zb_h1, PipelineShape(2, 4)),
    ):
        for zero in range(4):
            for recompute in (False, True):
                name = f"{schedule.__name__} zero {zero}" + ", recomputed" * recompute
                row_by_name[name] = ByteRow(schedule, shape, zero, recompute)
    for zero in (0, 1, 3):
        row_by_name[f"looped_bfs zero {zero}, states on the host"] = ByteRow(
            schedir.schedules.looped_bfs, PipelineShape(1, 3, 4), zero, False, states="host"
        )
    for zero in (2, 3):
        row_by_name[f"interleaved zero {zero}, each turn"] = ByteRow(
            schedir.schedules.interleaved, PipelineShape(2, 4, 2), zero, False, 2, "each_backward"
        )
        row_by_name[f"one_f_one_b zero {zero}, 3 replicas"] = ByteRow(
            schedir.schedules.one_f_one_b, PipelineShape(2, 3), zero, False, 3
        )
    return row_by_name


class LiveTensors(TorchDispatchMode):
    """Count the memory of all tensors that exist, and of those that operations create."""

    def __init__(self, but: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.excluded = {*_collect_storages(but)}
        self.tensor_refs = [ref(x) for x in gc.get_objects() if issubclass(type(x), Tensor)]
        self.storage_sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        argument_storages = _collect_storages(tree_leaves((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        # Only norms are in float64. They do not count, because a thread of Gloo may keep them.
        result_storages = _collect_storages(
            x for x in tree_leaves(result) if getattr(x, "dtype", 0) != torch.float64
        )
        self.storage_sizes |= {
            storage: size
            for storage, size in result_storages.items()
            if storage not in argument_storages
        }
        return result

    def bytes(self, but: Iterable[object]) -> int:
        """Return the live bytes without the tensors in `but`. Each storage counts once."""
        self.storage_sizes = {
            storage: size for storage, size in self.storage_sizes.items() if not storage.expired()
        }
        live_storages = self.storage_sizes | _collect_storages(
            x for storage in self.tensor_refs if (x := storage()) is not None
        )
        excluded = self.excluded | {*_collect_storages(but)}
        return sum(size for storage, size in live_storages.items() if storage not in excluded)


def _collect_storages(values: Iterable[object]) -> dict[StorageWeakRef, int]:
    """Return the bytes of the storages of all tensors that have a storage."""
    tensors = (x for x in values if isinstance(x, Tensor) and not is_lazy(x) and not x.is_sparse)
    return {StorageWeakRef(x): x.nbytes() for x in (t.untyped_storage() for t in tensors)}


class MemoryCheck:
    """Compare the live bytes after each instruction of a step with the prediction."""

    def __init__(self, executor: Executor, footprint: Footprint, live_tensors: LiveTensors) -> None:
        self.executor, self.footprint, self.live_tensors = executor, footprint, live_tensors
        self.measurement = Measurement(0, [], 0)
        self.calls = executor.runner.calls
        executor.runner.calls = [Call(wait, partial(self.run, k, run)) for k, (wait, run) in
                          enumerate(self.calls)]  # fmt: skip

    def run(self, k: int, run: Callable[[], None]) -> None:
        """Run an instruction, and compare the live bytes with the prediction."""
        run()
        state = self.executor.state
        joined = [*state.stream.joined.tolist(), False]
        if joined[k + 1]:  # the prediction applies after the last instruction of a group
            return
        sent_tensors = [
            slot
            for kind in BOUNDARY_VALUES
            if kind in state.slot_tables
            for slot in state.slot_tables[kind].values
        ]
        sent_tensors += [tensor for _, tensor in state.service(PendingSends).works.values()]
        checks = state.service(UpdateChecks)
        numbers = [
            checks.grad_norm,
            checks.finite_updates,
            *checks.checked_updates.values(),
            state.service(LossGradients).grad_scale,
            state.service(LossGradients).initial_gradient,
            *(
                service.grad_check.finite
                for service in state.list_services()
                if isinstance(service, OptimizerPlacement)
            ),
        ]
        host_tensors = [t for service in state.list_services() for t in service.list_host_tensors()]
        live_bytes = self.live_tensors.bytes(
            [
                *tree_leaves(sent_tensors),
                *tree_leaves(state.service(MessageBuffers).received),
                *state.losses,
                *numbers,
                *host_tensors,
            ]
        )
        position = int(np.flatnonzero(self.footprint.positions <= k)[-1])
        parts = {name: size for name, (_, size) in self.footprint.static_memory.items()}
        parts |= {
            name: float(size[position]) for name, (_, size) in self.footprint.dynamic_memory.items()
        }
        predicted_bytes = sum(size for name, size in parts.items() if name not in _MESSAGES)
        comparisons, differences, peak_bytes = self.measurement
        differences += (
            [(str(state.stream[k]), live_bytes, predicted_bytes)]
            if live_bytes != predicted_bytes
            else []
        )
        self.measurement = Measurement(comparisons + 1, differences, max(peak_bytes, live_bytes))


def measure(rank: int, row: ByteRow) -> Measurement:
    """Train as one process, and compare the live bytes of the second step with the prediction."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tensors_before = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    program = schedir.compile(
        row.schedule, row.shape, dp=row.dp, zero=row.zero, reduce_scatter_at=row.reduce,
        clip_grad_norm=True,
        buffer_sharing="minimal", recompute="all" if row.recompute else None,
        optimizer_placement=row.states,
    )  # fmt: skip
    transport = GlooTransport(program)
    cfg = gpt.GPTConfig(
        vocab=VOCAB, layers=row.shape.stages, hidden=HIDDEN, heads=2, context=CONTEXT, tied=False
    )
    count, boundary = row.shape.stages, Boundary((BATCH, CONTEXT, HIDDEN))
    m, numbers = row.shape.microbatches, torch.Generator().manual_seed(1)
    x, y = torch.randint(0, VOCAB, (2, m, BATCH, CONTEXT), generator=numbers)
    make = partial(torch.optim.AdamW, lr=1e-2)
    sizes = measure_sizes(
        [gpt.build_stage(cfg, s, count) for s in range(count)], x[0], y[0], loss=gpt.loss,
        boundary=boundary, optimizer_state=make, dp=row.dp, zero=row.zero,
        replica=transport.dp_rank,
    )  # fmt: skip
    rank_stages = program.shape.stages_on_rank[transport.rank]
    stages = {s: gpt.build_stage(cfg, s, count) for s in rank_stages}
    executor = Executor(
        program, transport.rank, stages, transport, loss=gpt.loss, boundary=boundary,
        optimizer=make([p for stage in stages.values() for p in stage.parameters()]),
        gradients=GradientOptions(max_norm=0.05),
    )  # fmt: skip
    executor.step(x, y, 1 / y.numel())
    gc.collect()
    with LiveTensors([*tensors_before, x, y]) as alive:
        memory_check = MemoryCheck(
            executor, compute_footprints(program, sizes)[transport.rank], alive
        )
        executor.step(x, y, 1 / y.numel())
    return memory_check.measurement


def run_row(row: ByteRow) -> list[Measurement]:
    """Return the measurements of each process of a row."""
    return run_processes(measure, row.shape.ranks * row.dp, row, limit=300)


def compare_bytes(options: argparse.Namespace) -> int:
    """Compare live and predicted bytes in each row. Return the number of rows that differ."""
    print_header("program", "processes", "looks", "beside", "most bytes, by rank and replica")
    differing_rows = 0
    for name, row in select_by_name(list_byte_rows(), options.names):
        measurements = run_row(row)
        differences = [
            difference for measurement in measurements for difference in measurement.differences
        ]
        worst = max(
            (abs(live_bytes - predicted_bytes) for _, live_bytes, predicted_bytes in differences),
            default=0,
        )
        peaks = ", ".join(str(measurement.peak_bytes) for measurement in measurements)
        print_row(
            name,
            len(measurements),
            sum(measurement.comparisons for measurement in measurements),
            f"{worst:g}",
            peaks,
        )
        if differences:
            print(*differences[:12], sep="\n", file=sys.stderr)
        differing_rows += bool(differences)
    return differing_rows


# ------------------------------------------------------------ gathers


class GatherRow(NamedTuple):
    """The gathers of a schedule with a number of unsharded stages."""

    active: int
    fewest: list[int]
    prefetched: list[int]
    torch: list[int]
    spans: tuple[float, float, float]


def count_torch_gathers(program: Program, max_unsharded: int) -> list[int]:
    """Return the number of gathers of each rank in torch's schedule.

    torch can keep several stages unsharded. The counts are those with the fewest gathers among the
    schedules with at most `max_unsharded` unsharded stages. Without such a schedule, the result is
    empty.
    """
    # Some users of this module do not need these two modules, so they are imported here.
    from torch.distributed.pipelining.schedules import _add_unshard_reshard

    from tests.cpu.test_zero_unshard_count import actions, residency

    gathers: list[list[int]] = []
    for active in range(1, max_unsharded + 1):
        listed = [
            residency(_add_unshard_reshard(actions(program, rank), active))
            for rank in range(program.shape.ranks)
        ]
        if max(peak for _, peak in listed) <= max_unsharded:
            gathers.append([times for times, _ in listed])
    return min(gathers, default=[])


def list_gather_rows(program: Program) -> Iterator[GatherRow]:
    """Yield a row for each possible number of unsharded stages."""
    for active in range(1, max(map(len, program.shape.stages_on_rank)) + 1):
        try:
            lowered = [
                compile(program, dp=2, zero=3, unsharded_stages=active, unshard_prefetch=k)
                for k in (0, 1)
            ]
        except ShapeError:
            continue  # a pair that runs together uses more stages
        fewest, prefetched = (count_unshards(compiled).unshards for compiled in lowered)
        free_costs = replace(COSTS, unshard=0)
        spans = [simulate(compiled, COSTS).span for compiled in lowered]
        spans.append(simulate(lowered[1], free_costs).span)
        yield GatherRow(
            active,
            fewest,
            prefetched,
            count_torch_gathers(program, active),
            (spans[0], spans[1], spans[2]),
        )


def format_by_rank(times: Sequence[float]) -> str:
    """Format the numbers of all ranks, or one number if they are equal."""
    return " ".join(map(str, times if len({*times}) > 1 else times[:1])) or "-"


def format_reductions(program: Program) -> list[str]:
    """Return cells with the reductions and their bytes, at the end and after each backward.

    The bytes are those of 1 GB of gradients per stage and 4 replicas.
    """
    cells = []
    for reduce_at in ("update_end", "each_backward"):
        lowered = compile(program, dp=4, zero=2, reduce_scatter_at=reduce_at)
        sent_gigabytes = count_sent_bytes(lowered, Sizes(grads=1e9))[Lane.DP] / 1e9
        cells += [
            format_by_rank(count_unshards(lowered).reductions),
            format_by_rank([round(gigabytes, 1) for gigabytes in sent_gigabytes]),
        ]
    return cells


def count_gathers(options: argparse.Namespace) -> int:
    """Print the numbers of gathers and reductions. Return 0, because nothing is compared."""
    print_header("schedule", "stages of a rank", "whole", "fewest", "one ahead", "torch",
         "time, none ahead", "one ahead", "free")  # fmt: skip
    drafts: dict[str, Program] = {}
    for name in schedules.__all__:
        schedule = getattr(schedules, name)
        placement, v = get_placement_mark(schedule)
        v = v or (options.stages_per_rank if has_free_v(schedule) else 1)
        if v == 1:
            continue  # a rank with one stage gathers it once and keeps it unsharded
        shape = PipelineShape(options.ranks, options.microbatches, v, placement or "loop")
        drafts[name] = expand_schedule(schedule, shape)
        for row in list_gather_rows(drafts[name]):
            times = map(format_by_rank, (row.fewest, row.prefetched, row.torch))
            print_row(name, v, row.active, *times, *(f"{span:.1f}" for span in row.spans))
    print()
    print_header("schedule", "at the end", "sent, GB", "in turns", "sent, GB")
    for name, program in drafts.items():
        if program.has_backward:
            print_row(name, *format_reductions(program))
    return 0


TABLES = {"bits": compare_bits, "bytes": compare_bytes, "gathers": count_gathers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", default="all", choices=("all", *TABLES))
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="bits and bytes: beginnings of names of cases"
    )
    parser.add_argument("--ranks", type=int, default=4, help="gathers: ranks")
    parser.add_argument("--microbatches", type=int, default=16, help="gathers: microbatches")
    parser.add_argument("--stages-per-rank", type=int, default=4, help="gathers: stages per rank")
    smoke_names = [
        "interleaved dp2 bf16",
        "looped_bfs zero 3, recomputed",
    ]  # of `bits`, and of `bytes`
    options = parse(parser, names=smoke_names, ranks=2, microbatches=4, stages_per_rank=2)
    difference_count = 0
    for name in TABLES if options.table == "all" else [options.table]:
        difference_count += TABLES[name](options)
        print()
    return int(difference_count > 0)


if __name__ == "__main__":
    sys.exit(main())
