"""Tests of services: the step loop calls optional features only through this interface."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import schedir
from schedir import PipelineShape
from schedir.errors import ExecutionError, ModelError
from schedir.runtime import Boundary, Executor, InProcessExecutor
from schedir.runtime.autograd.preserved_state import PreservedState
from schedir.runtime.program_state import Call, ProgramService, ProgramState
from schedir.runtime.rank_resources import Loss, RankResources, RankService
from schedir.runtime.recording.live_memory import LiveMemory
from schedir.runtime.services.service import Service
from schedir.runtime.step_inputs import StepInputs
from schedir.runtime.step_rollback import undo_steps
from schedir.schedules import one_f_one_b
from schedir.testing.tiny_model import WIDTH, make_batch, make_tiny_stages, squared_error

# The maximum number of attributes. A feature has its state in a service instead.
MAX_ATTRIBUTES = {ProgramState: 20, RankResources: 12}
MAX_EXECUTOR_ARGUMENTS = 12  # Options that belong together are an object.
# The files that run a step or surround it, with the services that they may name: `Executor` has
# public members of these.
CORE_FILES = {
    "program_state": set[str](),
    "rank_resources": set[str](),
    "program_runner": set[str](),
    "executor": {"MessageBuffers", "ShardedStages", "UpdateChecks"},
    "in_process": set[str](),
    "step_rollback": set[str](),
    "autograd.evaluation_mode": set[str](),
    "checkpoint_state": set[str](),
    "recording.live_memory": set[str](),
}


def _log(name: str) -> Any:
    """Return a method that only records its call."""

    def record(self: _CallLog, *_: object) -> None:
        self.calls.append(name)

    return record


class _CallLog(Service):
    """Records which methods were called, and keeps some memory."""

    begin_update, begin_step = _log("begin_update"), _log("begin_step")
    begin_optimizer_step, finish_step = _log("begin_optimizer_step"), _log("finish_step")
    restore, validate = _log("restore"), _log("validate")
    allow_weight_access, preserve = _log("lift_guard"), _log("preserve")
    require_savable, on_load = _log("require_savable"), _log("on_load")

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memory = torch.zeros(1000, dtype=torch.float64)

    def prepare_inputs(self, batch: StepInputs) -> StepInputs:
        self.calls.append("prepare_inputs")
        return batch._replace(targets=[2 * y for y in batch.targets])

    def fail(self, *, has_begun: bool) -> None:
        self.calls.append(f"fail {has_begun}")

    def needs_rerun(self) -> bool:
        self.calls.append("needs_rerun")
        return self.calls.count("needs_rerun") == 1

    def undo_steps(self, preserved: PreservedState, *, makes_update: bool) -> None:
        self.calls.append(f"undo {makes_update}")
        preserved.callback(lambda: self.calls.append("undone"))

    def list_device_tensors(self) -> Iterable[Tensor]:
        return [self.memory]

    def count_bytes(self, tier: str) -> int:
        return {"host": 70, "disk": 500}[tier]

    def take(self) -> list[str]:
        taken, self.calls = self.calls, []
        return taken


class _ProgramCallLog(ProgramService, _CallLog):
    def __init__(self, state: ProgramState) -> None:
        ProgramService.__init__(self, state)
        _CallLog.__init__(self)


class _MemoryService(_ProgramCallLog):
    """Creates no tensors itself."""

    def prepare_inputs(self, batch: StepInputs) -> StepInputs:
        return batch


class _RankCallLog(RankService, _CallLog):
    def __init__(self, resources: RankResources) -> None:
        RankService.__init__(self, resources)
        _CallLog.__init__(self)


def _make_executor(
    *extra_programs: schedir.Program, ranks: int = 1, loss: Loss = squared_error
) -> InProcessExecutor:
    shape = PipelineShape(ranks, 2)
    program = schedir.compile(one_f_one_b, shape, progress_model="per_edge", clip_grad_norm=True)
    return InProcessExecutor(
        program, make_tiny_stages(ranks), loss=loss, extra_programs=extra_programs,
        boundary=Boundary((2, WIDTH), torch.float64),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [_ProgramCallLog, _RankCallLog])
def test_each_phase_of_step_calls_services(kind: type[_ProgramCallLog | _RankCallLog]) -> None:
    world, plain = _make_executor(), _make_executor()
    (rank,) = world.executors
    log: _CallLog = rank.state.service(kind)
    step_calls = ["prepare_inputs", "begin_update", "begin_step", "begin_optimizer_step",
                  "finish_step", "restore", "needs_rerun"]  # fmt: skip
    inputs, targets = make_batch(2, 0)
    total = world.step(inputs, targets)
    # The service requested the second step.
    assert log.take() == ["lift_guard", *step_calls, *step_calls]
    expected = [plain.step(inputs, [2 * y for y in targets]) for _ in range(2)][-1]
    assert torch.equal(total, expected)
    world.validate_last_update()
    assert log.take() == ["lift_guard", "validate"]
    (saved,) = world.checkpoint_state().collect_rank_states(rank.resources.optimizer)
    assert log.take() == ["require_savable"]
    saved.set_loading(False)
    assert log.take() == ["on_load"]
    with undo_steps(rank.state):
        assert log.take() == ["preserve", "undo True"]
    assert log.take() == ["undone"]
    # An error before the first instruction, and one within it.
    with pytest.raises(ExecutionError):
        world.step(inputs[:1], targets)
    assert log.take()[-2:] == ["restore", "fail False"]
    rank.runner.calls[0] = Call(None, lambda: [][0])
    with pytest.raises(ExecutionError):
        world.step(inputs, targets)
    assert log.take()[-2:] == ["restore", "fail True"]


class _FailingService(ProgramService):
    """Raises an error in one method."""

    method = ""

    def fail_in(self, method: str, error: BaseException | None = None) -> None:
        def fail(*_: object, **options: object) -> None:
            self.method = method
            raise error or KeyboardInterrupt

        setattr(self, method, fail)


def _dropout_error(y: Tensor, target: Tensor) -> Tensor:
    return squared_error(nn.functional.dropout(y, 0.5), target)


@pytest.mark.parametrize("method", ["prepare_inputs", "begin_update", "begin_step"])
@pytest.mark.parametrize("rank", [0, 1])
def test_error_before_first_instruction_changes_no_later_step(rank: int, method: str) -> None:
    worlds = [_make_executor(ranks=2, loss=_dropout_error) for _ in range(2)]
    failure = worlds[0].executors[rank].state.service(_FailingService)
    failure.fail_in(method)
    with pytest.raises(KeyboardInterrupt):
        worlds[0].step(*make_batch(2, 0))
    assert failure.method == method
    delattr(failure, method)
    one, other = (world.step(*make_batch(2, 0)) for world in worlds)
    assert torch.equal(one, other)
    assert {executor.random_streams.step for world in worlds for executor in world.executors} == {1}


@pytest.mark.parametrize("method", ["restore", "fail"])
def test_error_in_cleanup_stops_no_other_service(method: str) -> None:
    world = _make_executor(ranks=2)
    for rank in world.executors:
        rank.state.service(_FailingService).fail_in(method)
    logs = [rank.state.service(_ProgramCallLog) for rank in world.executors]
    world.executors[0].runner.calls[0] = Call(None, lambda: [][0])
    with pytest.raises(KeyboardInterrupt):
        world.step(*make_batch(2, 0))
    assert [log.take()[-2:] for log in logs] == [["restore", "fail True"]] * 2


@pytest.mark.parametrize("is_in_process", [True, False])
@pytest.mark.parametrize("method", ["restore", "fail"])
def test_error_in_cleanup_keeps_error_of_step(method: str, *, is_in_process: bool) -> None:
    world = _make_executor()
    (rank,) = world.executors
    rank.state.service(_FailingService).fail_in(method)
    rank.runner.calls[0] = Call(None, lambda: [][0])
    with pytest.raises(KeyboardInterrupt) as caught:
        (world if is_in_process else rank).step(*make_batch(2, 0))
    assert isinstance(caught.value.__context__, ExecutionError)


@pytest.mark.parametrize("method", ["finish_step", "needs_rerun"])
def test_error_after_last_instruction_names_rank(method: str) -> None:
    world = _make_executor(ranks=2)
    service = world.executors[1].state.service(_FailingService)
    service.fail_in(method, OSError("disk full"))
    with pytest.raises(ExecutionError, match="after the last instruction of rank 1: OSError: d"):
        world.step(*make_batch(2, 0))


def test_model_error_of_finish_step_is_not_wrapped() -> None:
    world = _make_executor()
    service = world.executors[0].state.service(_FailingService)
    service.fail_in("finish_step", ModelError("a stage wrote to a weight"))
    with pytest.raises(ModelError, match="a stage wrote"):
        world.step(*make_batch(2, 0))


def test_live_memory_includes_services() -> None:
    def peaks(*, notes: bool) -> dict[str, int]:
        world = _make_executor()
        if notes:
            world.executors[0].state.service(_MemoryService).calls = ["needs_rerun"]
        with LiveMemory(world.executors[0]) as memory:
            world.step(*make_batch(2, 0))
        return memory.peak_by_tier

    before, after = peaks(notes=False), peaks(notes=True)
    assert {tier: after[tier] - before[tier] for tier in after} == {
        "device": 8000, "host": 70, "disk": 500,
    }  # fmt: skip


def test_programs_share_only_rank_services() -> None:
    extra_program = schedir.compile(one_f_one_b, PipelineShape(1, 4), progress_model="per_edge",
                                    clip_grad_norm=True)  # fmt: skip
    (rank,) = _make_executor(extra_program).executors
    first_state, second_state = (runner.state for runner in rank.runners.values())
    assert first_state.service(_RankCallLog) is second_state.service(_RankCallLog)
    assert first_state.service(_ProgramCallLog) is first_state.service(_ProgramCallLog)
    assert first_state.service(_ProgramCallLog) is not second_state.service(_ProgramCallLog)


@pytest.mark.parametrize("kind", MAX_ATTRIBUTES)
def test_core_objects_have_few_attributes(kind: type[ProgramState | RankResources]) -> None:
    (rank,) = _make_executor().executors
    core_object = rank.state if kind is ProgramState else rank.resources
    properties = {name for name, value in vars(kind).items() if isinstance(value, property)}
    assert len(vars(core_object).keys() | properties) <= MAX_ATTRIBUTES[kind]


@pytest.mark.parametrize("kind", [Executor, InProcessExecutor])
def test_executors_take_few_arguments(kind: type) -> None:
    assert len(signature(kind).parameters) <= MAX_EXECUTOR_ARGUMENTS


@pytest.mark.parametrize("name", CORE_FILES)
def test_core_files_name_no_service(name: str) -> None:
    module = import_module(f"schedir.runtime.{name}")
    names = {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_bytes()))
        if isinstance(node, ast.Name | ast.Attribute)
    }
    services = {
        service
        for service, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Service) and not service.startswith("_")
    }
    assert services - {"Service", "ProgramService", "RankService"} == CORE_FILES[name]
    assert not names & {"sharded_parameters", "optimizer_state", "spill_file"}


def test_unused_features_have_no_service() -> None:
    """The program has no sharding, offload or weight delay."""
    (rank,) = _make_executor().executors
    names = {kind.__name__ for kind in (*rank.resources.services, *rank.state.services)}
    assert names == {
        "LossGradients", "MessageBuffers", "PendingReductions", "PendingSends", "RankOptimizer",
        "SnapshotCopies", "UpdateChecks",
    }  # fmt: skip
    assert isinstance(rank.stages[0].module, nn.Module)
