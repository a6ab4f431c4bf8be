"""Tests that schedir reads torch.distributed.pipelining's programs, and that torch runs ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as theirs

from schedir import schedules, search_schedule
from schedir.analysis.progress_models import MODELS, ProgressModel
from schedir.compiler.compile import compile, finish_lowering, lower
from schedir.errors import CsvCellError
from schedir.io import torch_csv
from schedir.ir.cost.costs import Costs
from schedir.ir.isa.instructions import COMPUTE_OPS
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program
from schedir.predict.simulate import simulate
from schedir.predict.what_if import advise
from schedir.runtime.sequential_reference import run_sequential
from schedir.testing.tiny_model import WIDTH, make_batch, squared_error
from schedir.verify.check import check, check_draft
from tests.cases import ALL, cases, each_value
from tests.cpu.gloo_processes import run
from tests.cpu.torch_pipelines import make_stage
from tests.cpu.torch_schedules import LOOP, SINGLE, VEE, build_torch_schedule

# ---------------------------------------------------------------- torch's programs in schedir


def format_rows(order: dict[int, list[Any]]) -> str:
    return "\n".join(",".join(str(a or "") for a in order[rank]) for rank in sorted(order))


def read_program(text: str) -> Program:
    """Return the program of a CSV, lowered if necessary, and checked under every model."""
    program = torch_csv.from_csv(text)
    program = lower(check_draft(program)) if program.is_draft else finish_lowering(program)
    for model in MODELS:
        check(program, model)
    return program


def test_all_torch_schedules_are_tested() -> None:
    """A new schedule of torch needs an entry in these tests."""
    bases = {"PipelineScheduleSingle", "PipelineScheduleMulti", "get_schedule_class"}
    assert {*theirs.__all__} - bases == {*VEE, *LOOP, *SINGLE}


VEE_SHAPES = [PipelineShape(2, 4, 2, "vee"), PipelineShape(3, 8, 2, "vee")]
LOOP_SHAPES = [
    PipelineShape(1, 2, 2), PipelineShape(2, 4), PipelineShape(2, 6, 3), PipelineShape(4, 8, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape"), [*each_value(VEE, VEE_SHAPES), *each_value(LOOP, LOOP_SHAPES)]
)
def test_torch_schedules_import(name: str, shape: PipelineShape, tmp_path: Path) -> None:
    """Both CSV forms are legal under every model, and have the same compute."""
    path = tmp_path / "x.csv"
    schedule = build_torch_schedule(name, shape)
    orders = []
    for form in ("compute_only", "compute_comms"):
        schedule._dump_csv(str(path), format=form)
        program = read_program(path.read_text())
        assert program.shape.first_rank_per_stage.tolist() == shape.first_rank_per_stage.tolist()
        assert program.shape.microbatches == shape.microbatches
        orders.append([s.words[np.isin(s.op, COMPUTE_OPS)].tolist() for s in program.streams])
    assert orders[0] == orders[1]


# The page with the spans of torch 2.13's transfers and of ours, by schedule and model, for 4 ranks,
# 8 stages and 8 microbatches.
DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "speed-up-a-run.md"
DOCUMENTED = ("per_edge", "per_device", "blocking_serial")
SPANS = {
    f"Schedule{name}": dict(zip(DOCUMENTED, cells.split(" | "), strict=True))
    for name, cells in re.findall(r"^\| (\w+) \| ([\d., |]+) \|$", DOCS.read_text(), re.MULTILINE)
}


def test_documentation_lists_all_schedules() -> None:
    assert {*SPANS} == {*VEE, *LOOP}


@pytest.mark.parametrize(("name", "model"), each_value([*SPANS], MODELS if ALL else DOCUMENTED))
def test_predicted_spans_with_other_transfers_match_documentation(
    name: str, model: ProgressModel, tmp_path: Path
) -> None:
    """The spans that `explain` predicts are right, and torch loads the suggested program."""
    shape = PipelineShape(4, 8, 2, "vee" if name in VEE else "loop")
    schedule, path = build_torch_schedule(name, shape), str(tmp_path / "x.csv")
    schedule._dump_csv(path, format="compute_comms")
    program = finish_lowering(torch_csv.from_csv(Path(path).read_text()))
    costs = Costs(F=1, B=2, send=0.1)
    advice = advise(simulate(program, costs, progress_model=model), costs)
    (change,) = (c for c in advice.changes if c.row.kind == "transfers")
    spans = advice.baseline.span, advice.baseline.span * (1 - change.saved_share)
    assert spans[1] <= spans[0] * (1 + 1e-9)
    if model in SPANS[name] and torch.__version__ >= "2.13":
        assert ", ".join(f"{span:.1f}" for span in spans) == SPANS[name][model]
    predicted_spans = [
        advice.baseline.span * (1 - c.saved_share)
        for c in advice.changes
        if c.row.progress_model == "per_edge"
    ]
    per_edge_span = simulate(program, costs, progress_model="per_edge").span
    assert predicted_spans == [pytest.approx(per_edge_span)] * (model != "per_edge")
    csv = torch_csv.to_csv(change.run.program, "torch-2.13")
    Path(path).write_text(csv)
    runtime = theirs._PipelineScheduleRuntime(
        schedule._stages, n_microbatches=shape.microbatches, loss_fn=squared_error
    )
    runtime._load_csv(path, format="compute_comms")
    assert format_rows(runtime.pipeline_order_with_comms) == csv.rstrip("\n")
    if "OVERLAP" not in csv:  # torch's own search for deadlocks does not support these
        order = {
            rank: [a for a in actions if "REDUCE_GRAD" not in str(a)]
            for rank, actions in runtime.pipeline_order_with_comms.items()
        }
        rank_of = shape.first_rank_per_stage.tolist()
        theirs._simulate_comms_compute(order, rank_of.__getitem__, shape.stages)


@pytest.mark.parametrize("shape", [PipelineShape(1, 3), PipelineShape(2, 4), PipelineShape(4, 9)])
def test_torch_gpipe_equals_built_in_gpipe(shape: PipelineShape) -> None:
    program = read_program(
        format_rows(build_torch_schedule("ScheduleGPipe", shape)._get_pipeline_order())
    )
    assert program.streams == compile(schedules.gpipe, shape).streams


def test_torch_1f1b_list_equals_built_in_or_is_refused() -> None:
    """torch 2.13 lists an order for its last rank that begins with microbatch 1.

    torch does not use this list when it runs the schedule.
    """
    shape = PipelineShape(2, 4)
    text = format_rows(build_torch_schedule("Schedule1F1B", shape)._get_pipeline_order())
    if "1F4" in text:
        with pytest.raises(CsvCellError) as caught:
            read_program(text)
        assert (caught.value.line, caught.value.column) == (2, 7)
    else:
        assert read_program(text).streams == compile(schedules.one_f_one_b, shape).streams


# ---------------------------------------------------------------- schedir's programs in torch

OURS = [
    ("gpipe", PipelineShape(2, 4)),
    ("one_f_one_b", PipelineShape(2, 4)),
    ("interleaved", PipelineShape(2, 4, 2)),  # both neighbours are the same peer
    ("zb_h1", PipelineShape(2, 4)),
    ("interleaved_zb", PipelineShape(2, 4, 2)),
    ("zb_v", PipelineShape(2, 4, placement="vee")),
    ("v_half", PipelineShape(2, 4, placement="vee")),
    ("dualpipe_v", PipelineShape(2, 4, placement="vee")),
    ("search", PipelineShape(2, 4, 2)),  # a found schedule
    *cases([], [("search", PipelineShape(2, 4))]),
]
RUNS = each_value(OURS, torch_csv.CSV_FORMATS)


class Layer(nn.Module):
    def __init__(self, numbers: torch.Generator) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=numbers, dtype=p.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def make_stages(stages: int) -> list[nn.Module]:
    numbers = torch.Generator().manual_seed(0)
    return [Layer(numbers) for _ in range(stages)]


def run_in_torch(rank: int, folder: str) -> list[dict[int, list[Tensor]]]:
    """Return the gradients of this rank's stages, by stage, for each of RUNS."""
    return [
        run_torch_step(rank, name, shape, form, f"{folder}/{k}.csv")
        for k, (name, shape, form) in enumerate(RUNS)
    ]


def run_torch_step(
    rank: int, name: str, shape: PipelineShape, form: str, path: str
) -> dict[int, list[Tensor]]:
    stages, own_stages = make_stages(shape.stages), shape.stages_on_rank[rank]
    runtime = theirs._PipelineScheduleRuntime(
        [make_stage(stages[s], s, shape.stages) for s in own_stages],
        n_microbatches=shape.microbatches, loss_fn=squared_error,
    )  # fmt: skip
    runtime._load_csv(path, format="compute_only" if form == "torch" else "compute_comms")
    inputs, targets = (x.flatten(0, 1) for x in make_batch(shape.microbatches))
    args = (inputs,) if 0 in own_stages else ()
    runtime.step(*args, target=targets if shape.stages - 1 in own_stages else None)
    return {s: [p.grad for p in stages[s].parameters() if p.grad is not None] for s in own_stages}


def test_exported_programs_run_in_torch(tmp_path: Path) -> None:
    """torch runs the exported files with the right gradients. Its REDUCE_GRAD divides them."""
    for k, (name, shape, form) in enumerate(RUNS):
        costs = Costs(F=1.1, I=1.3, W=0.7, send=0.1)
        if name == "search":
            program = search_schedule(shape, costs, max_in_flight=3, max_evaluations=30).program
        else:
            program = compile(getattr(schedules, name), shape)
        (tmp_path / f"{k}.csv").write_text(torch_csv.to_csv(program, form))
    results = run(run_in_torch, 2, str(tmp_path))
    for (name, shape, form), *ranks in zip(RUNS, *results, strict=True):
        plain, batch = make_stages(shape.stages), make_batch(shape.microbatches)
        run_sequential(plain, *batch, loss=squared_error, grad_scale=1 / shape.microbatches)
        for rank, grads in enumerate(ranks):
            assert {*grads} == {*shape.stages_on_rank[rank]}
            for stage, got in grads.items():
                expected = [p.grad for p in plain[stage].parameters()]
                assert len(got) == len(expected)
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=0, msg=f"{name} {form}")
