"""Tests that gradients are summed over replicas by bucket during the last backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from schedir import compile
from schedir.errors import ExecutionError
from schedir.ir.isa.instructions import GRAD_ADDING_OPS, Instr, Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
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
from tests.cpu.gloo_processes import run
from tests.cpu.replicated_stages import (
    ROWS,
    WIDTH,
    Case,
    Layers,
    Log,
    buckets_of,
    executor_of,
    same,
    steps,
)
from tests.cpu.tiny_stages import zb
from tests.cpu.virtual_gpu import install
from tests.timeline_legality import too_early

GOLDEN = Path(__file__).parents[1] / "golden" / "written_late.txt"
ONE = PipelineShape(1, 3)
CASES = {
    "whole": Case(one_f_one_b, ONE),
    "split": Case(zb, ONE),
    "two stages": Case(interleaved, PipelineShape(1, 2, 2)),
    "two updates": Case(
        pipedream_2bw, PipelineShape(1, 4, optimizer_steps=2, weight_delay=1), clip=False
    ),
    "loss scale": Case(one_f_one_b, ONE, scaled=True),
    **{
        f"{how}, {schedule.__name__}": Case(schedule, ONE, how)
        for how in ("frozen", "hooks", "wide", "some", "twice", "checkpoint")
        for schedule in (one_f_one_b, zb)
    },
    **{
        how: Case(one_f_one_b, ONE, how)
        for how in (
            "checkpoint, reentrant",
            "checkpoint, reentrant, twice",
            "checkpoint, reentrant, shared",
            "hook of a module",
            "put in its place",
        )
    },
    "split, checkpoint, reentrant, shared": Case(zb, ONE, "checkpoint, reentrant, shared"),
}


def _early_and_late(rank: int) -> dict[str, tuple[bool, list[Log], list[Log], int]]:
    """Return for each case whether bits equal those of one late sum, both logs, and buckets."""
    found = {}
    for name, case in CASES.items():
        with buckets_of(4 * WIDTH * WIDTH):  # a weight, or biases
            executor = executor_of(case)
            early, log = steps(executor)
        late = executor_of(case)  # in one bucket
        late.state.service(PendingReductions).starts_after_backward = True
        right, late_log = steps(late)
        buckets = sum(len(stage.gradients.flat) for stage in executor.stages.values())
        found[name] = _same_but_for_the_norm(early, right), log, late_log, buckets
    return found


def _same_but_for_the_norm(early: list[Tensor], late: list[Tensor]) -> bool:
    """Return whether all bits are equal, except the last bits of the gradient norm.

    The norm is a sum over buckets. Other buckets are another order of summation, which rounds
    differently.
    """
    norms = [float(values.pop(-2)) for values in (early, late)]
    return norms[0] == pytest.approx(norms[1], rel=1e-15) and same(early, late)


@pytest.fixture(scope="module")
def replicas() -> list[dict[str, tuple[bool, list[Log], list[Log], int]]]:
    return run(_early_and_late, 2)


@pytest.mark.parametrize("name", CASES)
def test_buckets_give_the_bits_of_one_late_sum(name: str, replicas: list[Any]) -> None:
    updates = CASES[name].shape.optimizer_steps
    for same_bits, logs, late, buckets in (found[name] for found in replicas):
        assert same_bits and buckets > 3
        for log, other in zip(logs, late, strict=True):
            assert sum(line.startswith("bucket") for line in log) == updates * buckets
            assert not any(line.startswith("late") for line in log)
            assert not any(line.startswith("bucket") for line in other)
    one, two = (found[name][1] for found in replicas)
    assert _begun(one) == _begun(two)  # in the same order on both replicas
    if CASES[name].how == "some":
        assert {len(log) for log in one} != {len(log) for log in two}


def _begun(logs: list[Log]) -> list[str]:
    return [line for log in logs for line in log if "bucket" in line]


@pytest.mark.parametrize("name", ["whole", "two stages", "two updates", "hooks, one_f_one_b"])
def test_the_first_begins_before_the_last_backward_has_ended(
    name: str, replicas: list[Any]
) -> None:
    """The buckets of a layer begin before the backward reaches the previous layer."""
    for _, logs, _, _ in (found[name] for found in replicas):
        for log in logs:
            lines = iter(log)  # in this order, with others between
            for k in (3, 2, 1):
                assert "bucket 36" in lines and f"layer {k}" in lines


def _under_a_tape(rank: int) -> list[int]:
    """Return how much deferred work remains when each bucket begins."""
    left: list[int] = []
    with buckets_of(4 * WIDTH * WIDTH):
        executor = executor_of(Case(zb, ONE))
        mine: Any = executor.state.service(PendingReductions).by_instruction[
            Instr(Opcode.ReduceGrads, 0, 0)
        ]
        begin = mine.start_bucket

        def spy(k: int) -> Any:
            left.append(sum(map(len, mine.pending_grads)))
            return begin(k)

        mine.start_bucket = spy
        steps(executor)
    return left


def test_buckets_begin_under_the_last_tape() -> None:
    for left in run(_under_a_tape, 2):
        # The norm and the biases are complete before it, and then come four weights.
        assert left == 2 * [4, 3, 3, 2, 2, 1, 1, 0]


def _spoilt(rank: int) -> tuple[bool, int, bool, bool]:
    case = CASES["whole"]
    with buckets_of(64):
        early, _ = steps(executor_of(case), bad=True)
    late = executor_of(case)
    late.state.service(PendingReductions).starts_after_backward = True
    right, _ = steps(late, bad=True)
    lost = sum(int(t.isnan().sum()) for t in right[:-2])
    return same(early, right), lost, bool(right[0][0, 0].isnan()), bool(right[-1].any())


def test_a_loss_that_is_not_finite_spoils_one_number_of_all_replicas() -> None:
    assert run(_spoilt, 2) == [(True, 1, True, False)] * 2


def _holders(rank: int) -> bool:
    case = Case(chimera, PipelineShape(2, 4, placement="mirror"))
    with buckets_of(64):
        early, _ = steps(executor_of(case))
    late = executor_of(case)
    late.state.service(PendingReductions).starts_after_backward = True
    return _same_but_for_the_norm(early, steps(late)[0])


def test_two_holders_add_up_what_replicas_have() -> None:
    assert run(_holders, 4) == [True] * 4


def _too_late(rank: int, how: str) -> str:
    with buckets_of(64):
        executor = executor_of(Case(one_f_one_b, ONE, how))
    try:
        steps(executor)
    except ExecutionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["written late", "put in its place late"])
def test_what_is_written_too_late_is_refused(how: str) -> None:
    for text in run(_too_late, 2, how):
        assert re.sub(r"layers\.3\.\w+", "layers.3.weight", text) == GOLDEN.read_text().rstrip("\n")


def _put(rank: int, schedule: Any, replicas: int, how: str) -> bool:
    """Return whether a tensor that replaces a gradient is summed and scaled like all others."""
    shape = (
        PipelineShape(1, 4, optimizer_steps=2, weight_delay=1) if schedule is pipedream_2bw else ONE
    )
    torch.manual_seed(0)
    module, plain = Layers(how), Layers(how)
    plain.load_state_dict(module.state_dict())
    if schedule is zb:
        make_backward_splittable(module)
    program = compile(schedule, shape, dp=replicas, progress_model="per_edge", overlap=True)
    with buckets_of(64):
        loss = nn.functional.mse_loss
        executor = Executor(
            program, 0, {0: module}, GlooTransport(program), loss=loss, boundary=(ROWS, WIDTH)
        )
    x, y = 9 * torch.randn(2, shape.microbatches, ROWS, WIDTH)
    executor.step(x, y, 0.5 / replicas)
    for mb in range(shape.microbatches - shape.microbatches_per_update, shape.microbatches):
        loss(plain(x[mb]), y[mb]).backward()
    both = zip(module.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(p.grad, 0.5 * q.grad) for p, q in both)  # type: ignore[operator, arg-type]


@pytest.mark.parametrize("how", ["put in its place", "put by a Function"])
@pytest.mark.parametrize("schedule", [one_f_one_b, zb, pipedream_2bw])
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_put_in_the_place_of_a_gradient_is_the_gradient(
    schedule: Any, replicas: int, how: str
) -> None:
    assert all(run(_put, replicas, schedule, replicas, how))


def _origin(rank: int) -> tuple[int, int]:
    """Return the reported origin of a bad gradient in the last microbatch of replica 1."""
    with buckets_of(64):
        executor = executor_of(CASES["whole"], GlooTransport)
    transport: Any = executor.state.transport
    module: Any = executor.stages[0].module
    came: list[int] = []

    def spoil(g: Tensor) -> Tensor:
        came.append(rank)
        return g * torch.nan if rank and not len(came) % 3 else g

    module.layers[3].weight.register_hook(spoil)
    x, y = torch.ones(2, 3, ROWS, WIDTH)
    executor.step(x, y)
    found = find_origin(executor, transport.inner, [], x, y, 1.0)
    assert found is not None
    return found.replica, found.instr.mb


def test_where_numbers_go_wrong_is_seen_before_they_are_summed() -> None:
    assert run(_origin, 2) == [(1, 2)] * 2


def _timeline(rank: int) -> None:
    with buckets_of(64):
        executor = executor_of(Case(zb, ONE))
    steps(executor)
    transport: Any = executor.state.transport
    timeline = gather_timeline(executor, transport.inner)
    if timeline is not None:
        assert not too_early(timeline) and not timeline.causality_warning


def test_a_recorded_step_is_a_legal_timeline() -> None:
    run(_timeline, 2)


def _open(rank: int) -> dict[str, int]:
    """Return the number of works that each instruction of a step started for the watchdog."""
    with buckets_of(64):
        executor = executor_of(CASES["split"]._replace(clip=False))
    progress = GpuProgress(executor)
    steps(executor)
    works = zip(executor.state.stream, progress.step_events[-1].works, strict=True)
    return {str(i): len(own) for i, own in works if own}


def test_a_replica_that_is_late_is_waited_for_by_the_reduction() -> None:
    assert run(_open, 2) == [{"reduce_grads 0": 9}] * 2


def test_what_begins_early_is_recorded_as_of_its_own_instruction() -> None:
    class Ends:
        def wait(self) -> None:
            """At once."""

    stamps = HostTimestamps(2)
    stamps.begin_instruction(0)
    with stamps.attribute_to(1):
        work = stamps.follow_work(Ends())
    stamps.end_instruction(0)
    backward = stamps.end_times[0]
    stamps.begin_instruction(1)
    stamps.end_instruction(1)
    over = stamps.end_times[1]
    work.wait()
    assert stamps.end_times[0] == backward and stamps.end_times[1] > over
    with stamps.attribute_to(1):  # no event is recorded
        assert not isinstance(work, type(stamps.follow_work(Ends())))


def test_what_was_over_before_its_turn_ends_when_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = install(monkeypatch)
    lane = torch.cuda.Stream()

    class Ends:
        def wait(self) -> None:
            """At once."""

        def record_end(self, event: torch.cuda.Event) -> None:
            event.record(lane)

    program = compile(one_f_one_b, ONE, dp=2, progress_model="per_edge")
    own = [i.op for i in program.streams[0]]
    at = own.index(Opcode.ReduceGrads)
    assert own[at - 1] in GRAD_ADDING_OPS
    stamps = EventTimestamps(program, 0, "per_edge", torch.device("cpu"))
    for k in range(len(own)):
        stamps.begin_instruction(k)
        if k == at - 1:
            with stamps.attribute_to(at):
                stamps.follow_work(Ends())
            stamps.on_issued()
        gpu.work(1.0)
        stamps.end_instruction(k)
    stamps.end_step()
    (times,), _ = read_step_times([stamps])
    assert times.end[at - 1] == times.start[at] == times.end[at]


def test_one_replica_has_no_buckets() -> None:
    program = compile(gpipe, ONE)
    with buckets_of(64):
        executor = _alone(program)
    (stage,) = executor.stages.values()
    assert (
        len(stage.gradients.flat) == 1 and not executor.state.service(PendingReductions).overlapped
    )


def _alone(program: Program) -> Executor:
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss
    return InProcessExecutor(program, [Layers()], loss=loss, boundary=(ROWS, WIDTH)).executors[0]
