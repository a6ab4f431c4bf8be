"""Tests that gradients are summed over replicas by bucket during the last backward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, Instr, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.runtime import make_backward_splittable
from schedir.runtime.executor import Executor
from schedir.runtime.in_process import InProcessExecutor
from schedir.runtime.recording.gpu_progress import GpuProgress
from schedir.runtime.recording.measured_timeline import gather_timeline
from schedir.runtime.recording.nan_origin import find_origin
from schedir.runtime.recording.recorder import EventTimestamps, HostTimestamps, read_step_times
from schedir.runtime.services.pending_reductions import PendingReductions
from schedir.schedules import chimera, gpipe, interleaved, one_f_one_b, pipedream_2bw
from schedir.transports.gloo import GlooTransport
from tests.cases import each_value
from tests.cpu.gloo_processes import run
from tests.cpu.replicated_stages import (
    ROWS,
    WIDTH,
    Case,
    Log,
    ReplicatedLayers,
    create_executor,
    have_same_bits,
    limit_bucket_size,
    run_two_steps,
)
from tests.cpu.tiny_stages import split_1f1b
from tests.cpu.virtual_gpu import install_virtual_gpu
from tests.timeline_legality import find_early_instructions

GOLDEN = Path(__file__).parents[1] / "golden" / "written_late.txt"
ONE_RANK = PipelineShape(1, 3)
TWO_UPDATES = PipelineShape(1, 4, optimizer_steps=2, weight_delay=1)
CASES = {
    "whole": Case(one_f_one_b, ONE_RANK),
    "split": Case(split_1f1b, ONE_RANK),
    "two stages": Case(interleaved, PipelineShape(1, 2, 2)),
    "two updates": Case(pipedream_2bw, TWO_UPDATES, clip=False),
    "loss scale": Case(one_f_one_b, ONE_RANK, scaled=True),
    **{
        f"{how}, {schedule.__name__}": Case(schedule, ONE_RANK, how)
        for how, schedule in each_value(
            ("frozen", "hooks", "wide", "some", "twice", "checkpoint"), (split_1f1b, one_f_one_b)
        )
    },
    "checkpointed twice": Case(one_f_one_b, ONE_RANK, "checkpoint, reentrant, twice"),
    "checkpointed and shared": Case(one_f_one_b, ONE_RANK, "checkpoint, reentrant, shared"),
    "hook of a module": Case(one_f_one_b, ONE_RANK, "hook of a module"),
    "put in its place": Case(one_f_one_b, ONE_RANK, "put in its place"),
    "split, checkpoint, reentrant, shared": Case(
        split_1f1b, ONE_RANK, "checkpoint, reentrant, shared"
    ),
}


def _compare_early_and_late(rank: int) -> dict[str, tuple[bool, list[Log], list[Log], int]]:
    """Compare early reductions of buckets with one late reduction, for each case.

    Return whether the bits are equal, both logs, and the number of buckets.
    """
    results = {}
    for name, case in CASES.items():
        with limit_bucket_size(4 * WIDTH * WIDTH):  # a weight, or biases
            executor = create_executor(case)
            early_values, log = run_two_steps(executor)
        late_executor = create_executor(case)  # in one bucket
        late_executor.state.service(PendingReductions).starts_after_backward = True
        late_values, late_log = run_two_steps(late_executor)
        buckets = sum(len(stage.gradients.flat) for stage in executor.stages.values())
        results[name] = _equal_except_norm(early_values, late_values), log, late_log, buckets
    return results


def _equal_except_norm(early: list[Tensor], late: list[Tensor]) -> bool:
    """Return whether all bits are equal, except the last bits of the gradient norm.

    The norm is a sum over buckets. With other buckets the order of the sum differs, and it rounds
    differently.
    """
    norms = [float(values.pop(-2)) for values in (early, late)]
    return norms[0] == pytest.approx(norms[1], rel=1e-15) and have_same_bits(early, late)


@pytest.fixture(scope="module")
def replicas() -> list[dict[str, tuple[bool, list[Log], list[Log], int]]]:
    return run(_compare_early_and_late, 2)


@pytest.mark.parametrize("name", CASES)
def test_early_buckets_equal_one_late_reduction(name: str, replicas: list[Any]) -> None:
    updates = CASES[name].shape.optimizer_steps
    for same_bits, logs, late_logs, buckets in (results[name] for results in replicas):
        assert same_bits and buckets > 3
        for log, late_log in zip(logs, late_logs, strict=True):
            assert sum(line.startswith("bucket") for line in log) == updates * buckets
            assert not any(line.startswith("late") for line in log)
            assert not any(line.startswith("bucket") for line in late_log)
    first_logs, second_logs = (results[name][1] for results in replicas)
    assert _list_bucket_lines(first_logs) == _list_bucket_lines(
        second_logs
    )  # in the same order on both replicas
    if CASES[name].how == "some":
        assert {len(log) for log in first_logs} != {len(log) for log in second_logs}


def _list_bucket_lines(logs: list[Log]) -> list[str]:
    return [line for log in logs for line in log if "bucket" in line]


@pytest.mark.parametrize("name", ["whole", "two stages", "two updates", "hooks, one_f_one_b"])
def test_first_bucket_starts_before_last_backward_ends(name: str, replicas: list[Any]) -> None:
    """The reduction of a layer's bucket starts before the backward of the previous layer."""
    for _, logs, _, _ in (results[name] for results in replicas):
        for log in logs:
            lines = iter(log)  # in this order, with others between
            for k in (3, 2, 1):
                assert "bucket 36" in lines and f"layer {k}" in lines


def _count_deferred_gradients(rank: int) -> list[int]:
    """Return the number of deferred weight gradients at the start of each bucket."""
    counts: list[int] = []
    with limit_bucket_size(4 * WIDTH * WIDTH):
        executor = create_executor(Case(split_1f1b, ONE_RANK))
        reduction: Any = executor.state.service(PendingReductions).by_instruction[
            Instr(Opcode.ReduceGrads, 0, 0)
        ]
        start_bucket = reduction.start_bucket

        def count_and_start(k: int) -> Any:
            counts.append(sum(map(len, reduction.pending_grads)))
            return start_bucket(k)

        reduction.start_bucket = count_and_start
        run_two_steps(executor)
    return counts


def test_buckets_start_during_last_w() -> None:
    for counts in run(_count_deferred_gradients, 2):
        # The norm and the biases are complete before W, and then W computes four weights.
        assert counts == 2 * [4, 3, 3, 2, 2, 1, 1, 0]


def _train_early_and_late(case: Case, bad: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the values after two steps with early reductions, and with one late reduction."""
    with limit_bucket_size(64):
        early_values, _ = run_two_steps(create_executor(case), bad)
    late_executor = create_executor(case)
    late_executor.state.service(PendingReductions).starts_after_backward = True
    return early_values, run_two_steps(late_executor, bad)[0]


def _train_with_nan(rank: int) -> tuple[bool, int, bool, bool]:
    early, late = _train_early_and_late(CASES["whole"], bad=True)
    nan_count = sum(int(t.isnan().sum()) for t in late[:-2])
    is_nan, is_finite = bool(late[0][0, 0].isnan()), bool(late[-1].any())
    return have_same_bits(early, late), nan_count, is_nan, is_finite


def test_nonfinite_loss_spoils_one_element_on_all_replicas() -> None:
    assert run(_train_with_nan, 2) == [(True, 1, True, False)] * 2


def _train_stage_replicas(rank: int) -> bool:
    case = Case(chimera, PipelineShape(2, 4, placement="mirror"))
    return _equal_except_norm(*_train_early_and_late(case))


def test_stage_replicas_sum_early_buckets() -> None:
    assert run(_train_stage_replicas, 4) == [True] * 4


def _read_late_write_error(rank: int, how: str) -> str:
    with limit_bucket_size(64):
        executor = create_executor(Case(one_f_one_b, ONE_RANK, how))
    try:
        run_two_steps(executor)
    except ExecutionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["written late", "put in its place late"])
def test_gradient_write_after_its_reduction_is_refused(how: str) -> None:
    for text in run(_read_late_write_error, 2, how):
        assert re.sub(r"layers\.3\.\w+", "layers.3.weight", text) == GOLDEN.read_text().rstrip("\n")


def _train_with_replaced_gradient(rank: int, schedule: Any, replicas: int, how: str) -> bool:
    """Return whether a tensor that replaces a gradient is summed and scaled like the others."""
    shape = TWO_UPDATES if schedule is pipedream_2bw else ONE_RANK
    torch.manual_seed(0)
    module, plain = ReplicatedLayers(how), ReplicatedLayers(how)
    plain.load_state_dict(module.state_dict())
    if schedule is split_1f1b:
        make_backward_splittable(module)
    program = compile(schedule, shape, dp=replicas, progress_model="per_edge", overlap=True)
    with limit_bucket_size(64):
        loss = nn.functional.mse_loss
        executor = Executor(
            program, 0, {0: module}, GlooTransport(program), loss=loss, boundary=(ROWS, WIDTH)
        )
    x, y = 9 * torch.randn(2, shape.microbatches, ROWS, WIDTH)
    executor.step(x, y, 0.5 / replicas)
    for mb in range(shape.microbatches - shape.microbatches_per_update, shape.microbatches):
        loss(plain(x[mb]), y[mb]).backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(p.grad, 0.5 * q.grad) for p, q in pairs)  # type: ignore[operator, arg-type]


@pytest.mark.parametrize(
    ("replicas", "schedule", "how"),
    each_value(
        [2, 1], [one_f_one_b, split_1f1b, pipedream_2bw], ["put by a Function", "put in its place"]
    ),
)
def test_replaced_gradient_tensor_is_reduced(schedule: Any, replicas: int, how: str) -> None:
    assert all(run(_train_with_replaced_gradient, replicas, schedule, replicas, how))


def _find_nan_origin(rank: int) -> tuple[int, int]:
    """Return the reported origin of a bad gradient in the last microbatch of replica 1."""
    with limit_bucket_size(64):
        executor = create_executor(CASES["whole"], GlooTransport)
    transport: Any = executor.state.transport
    module: Any = executor.stages[0].module
    calls: list[int] = []

    def spoil(g: Tensor) -> Tensor:
        calls.append(rank)
        return g * torch.nan if rank and not len(calls) % 3 else g

    module.layers[3].weight.register_hook(spoil)
    x, y = torch.ones(2, 3, ROWS, WIDTH)
    executor.step(x, y)
    origin = find_origin(executor, transport.inner, [], x, y, 1.0)
    assert origin is not None
    return origin.replica, origin.instr.mb


def test_nan_origin_is_found_before_reduction() -> None:
    assert run(_find_nan_origin, 2) == [(1, 2)] * 2


def _check_recorded_timeline(rank: int) -> None:
    with limit_bucket_size(64):
        executor = create_executor(Case(split_1f1b, ONE_RANK))
    run_two_steps(executor)
    transport: Any = executor.state.transport
    timeline = gather_timeline(executor, transport.inner)
    if timeline is not None:
        assert not find_early_instructions(timeline) and not timeline.causality_warning


def test_recorded_step_is_legal_timeline() -> None:
    run(_check_recorded_timeline, 2)


def _count_works(rank: int) -> dict[str, int]:
    """Return the number of works that each instruction of a step started for the watchdog."""
    with limit_bucket_size(64):
        executor = create_executor(Case(split_1f1b, ONE_RANK, clip=False))
    progress = GpuProgress(executor)
    run_two_steps(executor)
    works = zip(executor.state.stream, progress.step_events[-1].works, strict=True)
    return {str(i): len(instruction_works) for i, instruction_works in works if instruction_works}


def test_works_of_buckets_belong_to_reduction() -> None:
    assert run(_count_works, 2) == [{"reduce_grads 0": 9}] * 2


class FinishedWork:
    """Work of a lane that has ended."""

    def __init__(self, lane: Any = None) -> None:
        self.lane = lane

    def wait(self) -> None:
        """Return immediately."""

    def record_end(self, event: torch.cuda.Event) -> None:
        event.record(self.lane)


def test_early_work_is_attributed_to_its_instruction() -> None:
    stamps = HostTimestamps(2)
    stamps.begin_instruction(0)
    with stamps.attribute_to(1):
        work = stamps.follow_work(FinishedWork())
    stamps.end_instruction(0)
    backward_end = stamps.end_times[0]
    stamps.begin_instruction(1)
    stamps.end_instruction(1)
    reduction_end = stamps.end_times[1]
    work.wait()
    assert stamps.end_times[0] == backward_end and stamps.end_times[1] > reduction_end
    with stamps.attribute_to(1):  # no event is recorded
        assert not isinstance(work, type(stamps.follow_work(FinishedWork())))


def test_work_that_ends_early_has_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install_virtual_gpu(monkeypatch)
    work = FinishedWork(torch.cuda.Stream())

    program = compile(one_f_one_b, ONE_RANK, dp=2, progress_model="per_edge")
    ops = [i.op for i in program.streams[0]]
    reduction = ops.index(Opcode.ReduceGrads)
    assert ops[reduction - 1] in GRAD_ADDING_OPS
    stamps = EventTimestamps(program, 0, "per_edge", torch.device("cpu"))
    for k in range(len(ops)):
        stamps.begin_instruction(k)
        if k == reduction - 1:
            with stamps.attribute_to(reduction):
                stamps.follow_work(work)
            stamps.on_issued()
        gpu.work(1.0)
        stamps.end_instruction(k)
    stamps.end_step()
    (times,), _ = read_step_times([stamps])
    assert times.end[reduction - 1] == times.start[reduction] == times.end[reduction]


def test_single_replica_has_one_bucket() -> None:
    with limit_bucket_size(64):
        (executor,) = InProcessExecutor(
            compile(gpipe, ONE_RANK), [ReplicatedLayers()], loss=nn.functional.mse_loss,
            boundary=(ROWS, WIDTH),
        ).executors  # fmt: skip
    (stage,) = executor.stages.values()
    assert len(stage.gradients.flat) == 1
    assert not executor.state.service(PendingReductions).overlapped
