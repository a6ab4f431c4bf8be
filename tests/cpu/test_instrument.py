"""Tests of `schedir.instrument` for torch's schedules, and of its rules for all trainers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

import schedir
from schedir import PipelineShape, schedules
from schedir.analysis.progress_models import MODELS
from schedir.errors import ExecutionError, UsageError
from schedir.instrumentation import __main__ as launcher
from schedir.instrumentation import deepspeed, megatron
from schedir.testing.tiny_model import WIDTH, make_batch, squared_error
from tests.cases import campaign
from tests.cpu.gloo_processes import run
from tests.cpu.torch_pipelines import make_stage
from tests.cpu.train_command import run_launched
from tests.cpu.trainer_traces import Runs, import_traces, list_computes, profile_step

ROOT = Path(__file__).parents[2]
RANKS, MICROBATCHES = 4, 5
STAGES = {"Schedule1F1B": 1, "ScheduleGPipe": 1, "ScheduleInterleaved1F1B": 2}


class _Layer(torch.nn.Linear):
    """A layer that records at each forward whether torch's functions are wrapped."""

    wrapped_flags: list[bool]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wrapped_flags.append(hasattr(theirs._batch_p2p, "__wrapped__"))
        return super().forward(x)


def _make_schedule(rank: int, name: str, wrapped_flags: list[bool]) -> Any:
    count = RANKS * STAGES[name]
    stages = []
    for s in range(rank, count, RANKS):
        layer = _Layer(WIDTH, WIDTH, dtype=torch.float64)
        layer.wrapped_flags = wrapped_flags
        stage = make_stage(layer, s, count)
        stages.append(stage)
    argument = stages if STAGES[name] > 1 else stages[0]
    return getattr(theirs, name)(argument, n_microbatches=MICROBATCHES, loss_fn=squared_error)


def _run_step(rank: int, schedule: Any, method: str = "step") -> None:
    inputs, targets = (x.flatten(0, 1) for x in make_batch(MICROBATCHES))
    getattr(schedule, method)(
        *(inputs,) * (rank == 0), target=targets if rank == RANKS - 1 else None
    )


def profile_schedules(rank: int, folder: str) -> dict[str, list[str]]:
    """Return the recorded ranges of each schedule, with and without instrumentation."""
    ranges = {}
    for name in STAGES:
        wrapped_flags: list[bool] = []
        schedule = _make_schedule(rank, name, wrapped_flags)
        step = partial(_run_step, rank, schedule)
        evaluate = partial(_run_step, rank, schedule, method="eval")
        with schedir.instrument("torch"):
            ranges[name] = profile_step(step, f"{folder}/{name}-{rank}.json")
            ranges[f"{name} eval"] = profile_step(evaluate, f"{folder}/{name} eval-{rank}.json")
            assert any(wrapped_flags)
            wrapped_flags.clear()
            step()
            assert wrapped_flags and not any(wrapped_flags)  # without a profiler
        ranges[f"plain {name}"] = profile_step(step, f"{folder}/plain-{rank}.json")
        assert not any(wrapped_flags)
    return ranges


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the folder of the traces, and the ranges of each rank."""
    folder = tmp_path_factory.mktemp("traces")
    return folder, run(profile_schedules, RANKS, str(folder))


FIRST = """
0F0 0SEND_F0 0F1 0WAIT_SEND_F0 0SEND_F1 0F2 0WAIT_SEND_F1 0SEND_F2 0F3 0WAIT_SEND_F2
(0SEND_F3;0RECV_B0)BATCH_P2P 0WAIT_SEND_F3 0WAIT_RECV_B0 0B0
0F4 (0SEND_F4;0RECV_B1)BATCH_P2P 0WAIT_SEND_F4 0WAIT_RECV_B1 0B1
0RECV_B2 0WAIT_RECV_B2 0B2 0RECV_B3 0WAIT_RECV_B3 0B3 0RECV_B4 0WAIT_RECV_B4 0B4 0REDUCE_GRAD
"""
LAST = """
3RECV_F0 3WAIT_RECV_F0 3F0 3RECV_F1 3WAIT_RECV_F1 3F1 3RECV_F2 3WAIT_RECV_F2 3F2
3RECV_F3 3WAIT_RECV_F3 3F3 3RECV_F4 3WAIT_RECV_F4 3F4
3B0 3SEND_B0 3B1 3SEND_B1 3B2 3SEND_B2 3B3 3SEND_B3 3B4 3SEND_B4
3WAIT_SEND_B0 3WAIT_SEND_B1 3WAIT_SEND_B2 3WAIT_SEND_B3 3WAIT_SEND_B4 3REDUCE_GRAD
"""


def test_schedules_without_ranges_get_all_ranges(runs: Runs) -> None:
    """Each forward, backward, message and wait has a range, in the order of torch's code."""
    _, ranks = runs
    assert ranks[0]["Schedule1F1B"] == FIRST.split()
    assert ranks[3]["ScheduleGPipe"] == LAST.split()
    for name in ("Schedule1F1B", "ScheduleGPipe"):
        assert all(rank[f"plain {name}"] == [] for rank in ranks)


def test_schedules_with_ranges_get_only_waits(runs: Runs) -> None:
    """Each compute contains the wait for its receive. The waits for sends are at the end."""
    for rank in runs[1]:
        ranges, plain = rank["ScheduleInterleaved1F1B"], rank["plain ScheduleInterleaved1F1B"]
        assert [name for name in ranges if "WAIT" not in name] == plain
        received = [name for name in plain if "RECV" in name]
        nested = [name.split(">") for name in ranges if ">" in name]
        assert sorted(wait.replace("WAIT_", "") for _, wait in nested) == sorted(received)
        assert all(wait.replace("WAIT_RECV_", "") == compute for compute, wait in nested)
        sent = [name for name in plain if "SEND" in name]
        send_waits = [name for name in ranges if "WAIT_SEND" in name]
        assert send_waits == ranges[-len(sent) :]
        assert sorted(name.replace("WAIT_", "") for name in send_waits) == sorted(sent)


@pytest.mark.parametrize(
    ("name", "ours"), [("Schedule1F1B", schedules.one_f_one_b), ("ScheduleGPipe", schedules.gpipe)]
)
def test_traces_of_torch_schedules_equal_built_in_schedules(
    name: str, ours: Any, runs: Runs
) -> None:
    program = import_traces(runs[0], name)
    assert list_computes(program) == list_computes(
        schedir.compile(ours, PipelineShape(RANKS, MICROBATCHES))
    )
    for model in MODELS:
        schedir.check(program, progress_model=model)


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleGPipe"])
def test_traces_of_evaluations_have_no_backward(name: str, runs: Runs) -> None:
    """torch also calls backwards in an evaluation, but they do nothing."""
    program = import_traces(runs[0], f"{name} eval")
    built_in = schedir.compile(schedules.forward_only, PipelineShape(RANKS, MICROBATCHES))
    assert list_computes(program) == list_computes(built_in) and not program.has_backward


def test_unexpected_messages_and_buffers_are_refused() -> None:
    """A received message must belong to the stage and microbatch that uses it."""
    stage, next_microbatch = (megatron._MessageStage(5, mb) for mb in (3, 4))
    tensor = torch.zeros(1)
    megatron._require_tag(tensor, stage)  # a tensor without a tag
    with pytest.raises(ExecutionError, match="no forward_step returned"):
        megatron._read_tag(tensor)
    step = megatron._MegatronStep(4, 1, iter([next_microbatch]), iter([]))
    assert step.name_message("recv_prev", tensor) == "5RECV_F4"
    assert step.name_message("send_prev", tensor) == "5SEND_B4"
    megatron._require_tag([tensor, None], next_microbatch)
    with pytest.raises(ExecutionError, match=r"stage 5 of microbatch 3 .* stage 5 of microbatch 4"):
        megatron._require_tag(tensor, stage)
    with pytest.raises(ExecutionError, match="more messages than its schedule contains"):
        step.name_message("recv_prev", tensor)

    schedule = SimpleNamespace(stage_id=2, stages=4, micro_batches=9, num_pipe_buffers=lambda: 2)
    deepspeed_step = deepspeed._DeepSpeedStep(schedule, queues_messages=False)
    names = [deepspeed_step.name_next_action("ForwardPass", buffer, 0) for buffer in (0, 1, 0)]
    assert names == ["2F0", "2F1", "2F2"]
    with pytest.raises(ExecutionError, match="not the buffer of microbatch 3"):
        deepspeed_step.name_next_action("ForwardPass", 0, 0)


def test_nested_instrumentation_is_undone_once() -> None:
    before = theirs.PipelineScheduleSingle.step
    first, second = schedir.instrument("torch"), schedir.instrument("torch")
    instrumented = theirs.PipelineScheduleSingle.step
    assert instrumented is not before and instrumented.__wrapped__ is before  # type: ignore[attr-defined]
    first.undo()
    first.undo()
    assert theirs.PipelineScheduleSingle.step is instrumented
    second.undo()
    assert theirs.PipelineScheduleSingle.step is before


def _profile_nested_schedule(rank: int, path: str) -> list[str]:
    """Return the ranges of a step whose loss runs another schedule. An earlier step fails."""
    x = torch.ones(4, WIDTH)

    def make_schedule(loss_fn: Any) -> Any:
        stage = make_stage(torch.nn.Linear(WIDTH, WIDTH), 0, 1)
        return theirs.Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_fn)

    teacher = make_schedule(torch.nn.functional.mse_loss)

    def loss_with_teacher(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hints: list[torch.Tensor] = []
        teacher.eval(target, target=target, losses=hints)
        return (y - target).square().mean() + sum(hints)

    def failing_loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss")

    with schedir.instrument("torch"):
        with pytest.raises(ValueError, match="no loss"):
            profile_step(partial(make_schedule(failing_loss).step, x, target=x), path)
        return profile_step(partial(make_schedule(loss_with_teacher).step, x, target=x), path)


def test_nested_schedule_has_no_ranges(tmp_path: Path) -> None:
    (ranges,) = run(_profile_nested_schedule, 1, str(tmp_path / "trace.json"))
    assert ranges == ["0F0", "0B0", "0F1", "0B1", "0REDUCE_GRAD"]


def test_later_patches_of_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with schedir.instrument("torch"):
        instrumented = theirs.PipelineScheduleSingle.step

        def patched_step(self: Any, *args: Any) -> Any:
            return instrumented(self, *args)

        monkeypatch.setattr(theirs.PipelineScheduleSingle, "step", patched_step)
    assert theirs.PipelineScheduleSingle.step is patched_step


@pytest.fixture
def _without_trainers() -> Iterator[None]:
    """Unload Megatron and DeepSpeed, so that a test can replace or hide them."""

    def unload() -> dict[str, Any]:
        names = [n for n in sys.modules if n.partition(".")[0] in ("megatron", "deepspeed")]
        return {name: sys.modules.pop(name) for name in names}

    loaded = unload()
    yield
    unload()
    sys.modules.update(loaded)


@pytest.mark.usefixtures("_without_trainers")
def test_instrument_without_name_skips_missing_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron", "deepspeed"):
        monkeypatch.setitem(sys.modules, name, None)
    with schedir.instrument() as instrumentation:
        assert instrumentation.trainers == {"torch": torch.__version__}
        assert {*instrumentation.skipped} == {"megatron", "deepspeed"}
        assert str(instrumentation).startswith("instrumented torch ")


@campaign
@pytest.mark.filterwarnings("ignore")  # trainers warn about missing packages at import
def test_instrument_without_name_covers_installed_trainers() -> None:
    with schedir.instrument() as instrumentation:
        assert instrumentation.trainers["torch"] == torch.__version__
        names = ("megatron", "deepspeed")
        assert {*instrumentation.skipped} == {name for name in names if find_spec(name) is None}


def test_unknown_trainer_name_changes_nothing() -> None:
    before = theirs.PipelineScheduleSingle.step
    with pytest.raises(UsageError) as caught:
        schedir.instrument("torch", "titan")
    assert caught.value.hint == "the trainers are 'torch', 'megatron', 'deepspeed'"
    assert theirs.PipelineScheduleSingle.step is before


# Files of packages that have the names of trainers, but lack their functions.
_PACKAGES = {
    "megatron/__init__.py": "",
    "deepspeed/__init__.py": "__version__ = '0.3.0'",
    "deepspeed/runtime/pipe/engine.py": "class PipelineEngine: ...",
    "broken/deepspeed/__init__.py": "import of_what_is_not_there",
}


@pytest.mark.usefixtures("_without_trainers")
def test_unsuitable_packages_raise_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in _PACKAGES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    errors = []
    for folder, names in (
        (tmp_path, ["megatron", "deepspeed"]),
        (tmp_path, ["titan"]),
        (tmp_path / "broken", ["deepspeed"]),
    ):
        monkeypatch.syspath_prepend(folder)
        for module in [name for name in sys.modules if name.startswith("deepspeed")]:
            del sys.modules[module]
        with pytest.raises(UsageError) as caught:
            schedir.instrument(*names)
        errors.append(f"{caught.value}\n")
    assert "".join(errors) == (ROOT / "tests" / "golden" / "instrument.txt").read_text()


PROGRAM = """\
import sys, helper
from torch.distributed.pipelining import schedules
print(__name__, sys.argv[1:], hasattr(schedules.Schedule1F1B.step, '__wrapped__'))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a program that imports a module of its folder."""
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


@pytest.mark.parametrize("module", [False, True])
def test_launcher_runs_file_or_module(
    program: Path, module: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program has its arguments, and its folder or the path of the launcher."""
    monkeypatch.setattr(sys, "path", [str(program.parent) if module else "", *sys.path])
    words = ["-m", "program"] if module else [str(program)]
    monkeypatch.setattr(sys, "argv", ["schedir.instrumentation", *words, "-m", "--steps=2"])
    with ExitStack() as stack, monkeypatch.context() as patch:
        # The launcher never undoes its marks, and would import all trainers.
        marks = lambda: stack.enter_context(schedir.instrument("torch"))  # noqa: E731
        patch.setattr(launcher, "instrument", marks)
        launcher.main()
    sys.modules.pop("helper")
    assert capsys.readouterr().out == "__main__ ['-m', '--steps=2'] True\n"


def test_launcher_process_instruments_program(program: Path, tmp_path: Path) -> None:
    """`torchrun -m schedir.instrumentation` starts this process."""
    # Importing the installed trainers would take ten seconds.
    start = tmp_path / "start.py"
    start.write_text(
        "import runpy, sys\nsys.modules |= {'megatron': None, 'deepspeed': None}\n"
        "runpy.run_module('schedir.instrumentation', run_name='__main__', alter_sys=True)\n"
    )
    words = [str(start), str(program), "-m", "--steps=2"]
    code, out, err = run_launched(words, tmp_path / "run")
    assert (code, out) == (0, "__main__ ['-m', '--steps=2'] True\n"), err


def test_launcher_without_program_prints_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["schedir.instrumentation"])
    with pytest.raises(SystemExit, match=r"^usage: python -m schedir.instrumentation"):
        launcher.main()
