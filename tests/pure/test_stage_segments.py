"""Stage segments: their collectives, their costs, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedir import (
    Costs,
    PipelineShape,
    Program,
    Sizes,
    check,
    compile,
    evaluation_program,
    from_text,
    schedules,
    simulate,
    split_costs,
    to_text,
)
from schedir.compiler.relower import extract_compute, infer_options
from schedir.errors import (
    CompletenessError,
    OrderError,
    SchedirError,
    ShapeError,
    UsageError,
)
from schedir.io import torch_csv
from schedir.io.source_loader import load_source
from schedir.ir.isa.instructions import COMPUTE_OPS, Opcode, find_segment_collectives
from schedir.ir.pipeline.placement import find_named_placement
from schedir.passes.splitting.stage_segmentation import count_segments, divide_over_stages
from tests import commands
from tests.cases import each_value
from tests.mutants import built_in_schedules
from tests.oracle import Machine
from tests.oracle_threads import verdict

_SUMS = {*find_segment_collectives(sequence_parallel=False)}
FULL_COSTS = Costs(F=5, B=10, I=5, W=5, send=0.5)
NAMES = [schedule.__name__ for schedule in built_in_schedules()]


def shape_of(schedule: Any, ranks: int = 2, microbatches: int = 4) -> PipelineShape:
    placement, v = getattr(schedule, "placed", ("loop", None))
    v = v or find_named_placement(placement).stages_per_rank
    return PipelineShape(ranks, microbatches, v, placement)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("schedule", built_in_schedules(), ids=NAMES)
def test_built_in_schedules_compile_with_segments(schedule: Any, sequence_parallel: bool) -> None:
    """All built-in schedules are legal with stage segments, for both independent machines.

    If collectives take no time, they take as long as without segments, except for pairs of a
    forward and a backward.
    """
    shape = shape_of(schedule)
    try:
        uncut = compile(schedule, shape, tp=2, sequence_parallel=sequence_parallel)
    except SchedirError:
        pytest.skip("not for this shape")
    program = compile(schedule, shape, tp=2, sequence_parallel=sequence_parallel, stage_segments=3)
    assert check(program, "blocking_serial") and verdict(program, "per_edge").kind == "ok"
    assert from_text(to_text(program)) == program and program.shape.stages == 3 * shape.stages
    costs = Costs(F=1, B=2, I=1, W=1, send=0.5, tp_reduce=0.75, tp_gather=0.25)
    machine = Machine(program, "per_edge", costs)
    assert machine.run()
    span = simulate(program, costs, progress_model="per_edge").span
    assert max(machine.ended.values()) == pytest.approx(span)
    number = shape.stages * shape.microbatches
    for kind in ("Reduce", "Gather") if sequence_parallel else ("Reduce",):
        counts = [np.sum(program.op == Opcode[f"TP{kind}{of}"]) for of in ("Act", "Grad")]
        assert counts == [number, number * uncut.has_backward]
    if not uncut.joined.any():
        span = simulate(program, split_costs(FULL_COSTS, 3, shape, (1, 3, 1))).span
        assert span == pytest.approx(simulate(uncut, FULL_COSTS).span)


def test_segments_are_neighbor_stages_on_rank() -> None:
    program = compile(
        schedules.zb_h1,
        PipelineShape(2, 2, sequence_chunks=1),
        tp=2,
        stage_segments=(2, "gf"),
        clip_grad_norm=True,
    )
    assert program.shape.first_rank_per_stage.tolist() == [0, 0, 1, 1, 1]
    assert program.segment_boundaries == "f-gf"
    rank_1_order = [str(i) for i in program.streams[1] if i.op in {*COMPUTE_OPS, *_SUMS}]
    assert rank_1_order[:5] == ["F 2.0", "tp_reduce_act 3.0", "F 3.0", "F 4.0", "I 4.0"]
    assert rank_1_order[5:9] == ["tp_reduce_grad 3.0", "I 3.0", "I 2.0", "F 2.1"]
    assert [i.stage for i in program.streams[1] if i.op is Opcode.BackwardWeight] == [4, 3, 2] * 2


def test_program_attributes_apply_to_segments() -> None:
    shape = PipelineShape(4, 8, optimizer_steps=2, weight_delay=(3, 2, 1, 0))
    program = compile(
        schedules.one_f_one_b, shape, tp=2, stage_segments=(1, 2, 1, 3), tied_weights=True
    )
    assert program.shape.weight_delay == (3, 2, 2, 1, 0, 0, 0) and program.tied_weights == ((0, 6),)
    program = compile(
        schedules.gpipe,
        PipelineShape(4, 4),
        tp=2,
        stage_segments=3,
        skips=[(0, 2)],
        frozen_stages=2,
    )
    assert program.skips == ((2, 6),) and program.frozen_stages == 6
    grads = {i.stage for stream in program.streams for i in stream if i.op is Opcode.TPReduceGrad}
    assert grads == {6, 9}, "nothing is summed for what is frozen"
    assert (
        replace(program, name="x").digest
        != replace(program, segment_boundaries="fg-" * 3 + "gf").digest
    )


def test_segments_without_tensor_parallelism_have_no_sums() -> None:
    program = compile(schedules.gpipe, PipelineShape(2, 2), stage_segments=5)
    assert program.shape.stages == 10 and program.used_opcodes.isdisjoint(_SUMS)
    assert program.segment_boundaries == "....-...." and program.segments_per_stage == (5, 5)
    assert compile(schedules.gpipe, PipelineShape(2, 2), tp=2, stage_segments=1) == compile(
        schedules.gpipe, PipelineShape(2, 2), tp=2
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_relowered_program_is_unchanged(sequence_parallel: bool) -> None:
    options: dict[str, Any] = {"tp": 2, "stage_segments": "fg", "clip_grad_norm": True}
    options["sequence_parallel"] = sequence_parallel
    program = compile(schedules.one_f_one_b, PipelineShape(2, 4), **options)
    draft = extract_compute(program)
    assert compile(draft, **infer_options(program, "per_device", draft)) == program
    evaluation = evaluation_program(program)
    assert evaluation.segment_boundaries == program.segment_boundaries
    assert evaluation.sequence_parallel == sequence_parallel
    collectives = {*find_segment_collectives(sequence_parallel)} & evaluation.used_opcodes
    gathers = {Opcode.TPGatherAct} if sequence_parallel else set()
    assert collectives == {Opcode.TPReduceAct, *gathers}
    grouped = compile(schedules.one_f_one_b, PipelineShape(2, 4), overlap=True, **options)
    assert sorted(map(str, grouped.streams[0])) == sorted(map(str, program.streams[0]))


@pytest.mark.parametrize(
    ("boundaries", "sequence_parallel", "costs", "collective_time"),
    [
        ("g", False, Costs(F=2, B=2, tp_reduce=3), 3),
        ("f", False, Costs(F=2, B=2, tp_reduce=3), 3),
        ("f", True, Costs(F=2, B=2, tp_gather=1, tp_reduce=2), 3),
        ("g", True, Costs(F=2, B=2, tp_gather=2, tp_reduce=1), 3),
        ("fg", True, Costs(F=2, B=2, tp_gather=1, tp_reduce=0.5), 2 * 1.5),
    ],
)
def test_segment_collectives_take_their_cost(
    boundaries: str, sequence_parallel: bool, costs: Costs, collective_time: float
) -> None:
    """A blocking host continues during a collective too."""
    options: dict[str, Any] = {"tp": 2, "sequence_parallel": sequence_parallel}
    shape = PipelineShape(1, 1)
    program = compile(schedules.gpipe, shape, stage_segments=boundaries, **options)
    for blocks in (False, True):
        span = simulate(program, costs, blocking_hosts=blocks).span
        assert span == 4 * (len(boundaries) + 1) + collective_time


@pytest.mark.parametrize(("op", "segments"), [
    ("tp_reduce", "g"), ("tp_gather", "f sequence_parallel yes"),
])  # fmt: skip
def test_host_continues_during_collective(op: str, segments: str) -> None:
    """Instructions between a collective and its use run during the collective."""
    text = f"F 0.0; {op}_act 1.0; F 0.1; {op}_act 1.1; F 1.0; F 1.1"
    header = f"stages_per_rank 2 placement 0,0 tp 2\nmeets {segments}"
    program = from_text(f"schedir 1\nprogram p\nranks 1 microbatches 2 {header}\nrank 0\n  {text}")
    for blocks in (False, True):
        assert simulate(program, Costs(F=2, **{op: 2}), blocking_hosts=blocks).span == 8


def test_compare_divides_segments_over_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` divides `stage_segments` over all stages of a rank."""
    options = (
        "--ranks=2",
        "--microbatches=4",
        "-O",
        "tp=2",
        "--costs=F=8,B=16,tp_reduce=1",
        "--json",
    )
    schedule_names = ("one_f_one_b", "interleaved", "zb_v", "dualpipe")
    rows = json.loads(
        commands.run_command(capsys, "compare", *schedule_names, "-O", "stage_segments=9", *options)
    )
    assert [row["stages"] for row in rows] == [18, 20, 20, 18]
    recommended = json.loads(
        commands.run_command(capsys, "recommend", "-O", "stage_segments=5", *options)
    )
    schedules_found = {(row["program"], row["stages_per_rank"]) for row in recommended}
    # With 4 stages per rank, the segments cannot be divided.
    assert {v for name, v in schedules_found if name == "interleaved"} == {2}
    for wrong in ("3", "fgg"):
        argv = ("compare", "interleaved", "-O", f"stage_segments={wrong}", *options)
        assert "which do not divide equally over its 2 stages" in commands.run_refused_command(
            capsys, *argv
        )
    for segments in ("9", "9,5", "1,9"):  # the number of segments does not change the memory
        rows = json.loads(
            commands.run_command(
                capsys, "compare", *schedule_names, "-O", f"stage_segments={segments}", *options
            )
        )
        assert [row["peak_activations"] for row in rows] == [2, 2.5, 2, 3]


@pytest.mark.parametrize(("pairs", "v"), [(0, 1), (0, 3), (1, 2), (2, 3)])
def test_segments_of_rank_are_divided_equally_over_its_stages(pairs: int, v: int) -> None:
    of_stages = divide_over_stages(1 + 2 * pairs * v, 2, 2 * v)
    shape = PipelineShape(2, 2, stages_per_rank=v)
    assert count_segments(of_stages, shape) == (1 + 2 * pairs,) * (2 * v)


@pytest.mark.parametrize(
    ("name", "cut", "tp"),
    each_value(
        ["one_f_one_b", "interleaved", "dualpipe", "zb_h1"], ["9", "9,5", "g.g,1"], ["1", "2"]
    ),
)
def test_segment_file_compares_like_its_schedule(
    name: str, cut: str, tp: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program file with segments is compared like its schedule without segments.

    Costs and sizes are those of a rank. Activations count in complete microbatches of a rank.
    """
    if name == "interleaved" and "." in cut:
        pytest.skip("two stages cannot share g.g alike")
    file, stages = str(tmp_path / "x.sched"), 4 if name == "interleaved" else 2
    shape = ("--ranks=2", "--microbatches=4", "-O", f"tp={tp}", "-O", "microbatch_chunks=2")
    options = ("--costs=F=8,B=16,I=8,W=8,tp_reduce=1", "--sizes=saved=40,activation=2", "--json")
    of_stages = ",".join(str(segments) for segments in divide_over_stages(cut, 2, stages))
    commands.run_command(
        capsys, "print", name, *shape, "-O", f"stage_segments={of_stages}", "-o", file
    )
    program = load_source(file)
    assert isinstance(program, Program) and program.chunks_per_microbatch == 2
    placement = program.unsegmented_shape.placement
    assert program.unsegmented_shape == PipelineShape(2, 4, placement=placement)
    assert program.segments_per_stage == count_segments(of_stages, program.unsegmented_shape)
    assert from_text(to_text(program)) == program
    assert extract_compute(program).unsegmented_shape == program.unsegmented_shape
    outputs = [commands.run_command(capsys, "compare", file, *options)]
    outputs += [
        commands.run_command(
            capsys, "compare", name, *shape, "-O", f"stage_segments={cut}", *options
        )
    ]
    file_row, live = (json.loads(output)[0] for output in outputs)
    live["digest"] = file_row["digest"]  # the order of transfers depends on the costs
    assert file_row == live and file_row["peak_activations"] < 4
    assert file_row["segment_boundary_sizes"] == "as between stages"


def test_compare_options_count_unsegmented_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options for all compared schedules count complete microbatches and unsegmented stages."""
    file, costs = str(tmp_path / "x.sched"), "--costs=F=8,B=16,tp_reduce=1"
    shape = ("--ranks=2", "--microbatches=4")
    commands.run_command(
        capsys,
        "print",
        "one_f_one_b",
        *shape,
        "-O",
        "tp=2",
        "-O",
        "stage_segments=fgfg,g",
        "-O",
        "microbatch_chunks=2",
        "-o",
        file,
    )

    def run_compare(*argv: str) -> list[dict[str, Any]]:
        return list(json.loads(commands.run_command(capsys, "compare", *argv, costs, "--json")))

    assert [row["microbatches"] for row in run_compare(file, "gpipe", *shape)] == [8, 4]
    for argv, error in (
        ("--microbatches=8", "has microbatches 4, not 8"),
        ("-O frozen_stages=1", "has frozen_stages 0, not 1"),
        ("--relower -O stage_segments=5", "already have segments"),
    ):
        assert error in commands.run_refused_command(capsys, "compare", file, *argv.split(), costs)
    (relowered,) = run_compare(file, "--relower", "-O", "frozen_stages=1")
    live = run_compare(
        "one_f_one_b",
        *shape,
        "-O",
        "tp=2",
        "-O",
        "stage_segments=fgfg,g",
        "-O",
        "microbatch_chunks=2",
        "-O",
        "frozen_stages=1",
    )[0]
    assert (relowered["span"], relowered["peak_activations"]) == (
        live["span"],
        live["peak_activations"],
    )


def test_search_refuses_segment_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The search refuses a run with collectives between segments, and accepts one without."""
    file, costs = str(tmp_path / "x.timeline"), "--costs=F=1,B=2,tp_reduce=0.5"
    shape = ("--ranks=2", "--microbatches=2", "-O", "stage_segments=3")
    commands.run_command(capsys, "simulate", "one_f_one_b", *shape, "-O", "tp=2", costs, "-o", file)
    command = ("search", f"--costs-from={file}", "--max-evaluations=5")
    assert "collectives between stage segments" in commands.run_refused_command(capsys, *command)
    commands.run_command(capsys, "simulate", "one_f_one_b", *shape, costs, "-o", file)
    assert "-O segment_boundaries=..-.." in commands.run_command(capsys, *command)


def test_declared_chunks_count_like_split_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks that an option declares count as in a file: costs are those of a microbatch."""
    command = ("compare", "gpipe", "--ranks=2")
    spans = [
        json.loads(
            commands.run_command(capsys, *command, *options.split(), "--costs=F=8,B=16", "--json")
        )[0]
        for options in (
            "--microbatches=2 -O microbatch_chunks=2",
            "--microbatches=4 -O chunks_per_microbatch=2",
        )
    ]
    assert [row["span"] for row in spans] == [60, 60]
    cluster = "--cluster=examples/selene.toml"
    assert "the costs of microbatch chunks" in commands.run_refused_command(
        capsys, *command, "-O", "chunks_per_microbatch=2", cluster
    )


def test_split_costs_and_sizes_over_segments() -> None:
    shape = PipelineShape(2, 2)
    costs = split_costs(Costs(F=(6, 12), B=12, send=1, step=(7, 8)), 3, shape, (1, 4, 1))
    assert costs.F == (1, 4, 1, 2, 8, 2) and costs.send == 1 and costs.step == (7, 8)
    sizes = split_costs(Sizes(activation=3, saved=10, params=4), (1, 2), shape)
    assert sizes.saved == (10, 5, 5) and sizes.activation == 3 and sizes.params == (4, 2, 2)
    program = compile(schedules.one_f_one_b, shape, tp=2, stage_segments=3)
    unsegmented = simulate(compile(schedules.one_f_one_b, shape, tp=2), sizes=Sizes(saved=90.0))
    segmented = simulate(program, sizes=split_costs(Sizes(saved=90.0), 3, shape))
    assert segmented.peak_memory.tolist() == unsegmented.peak_memory.tolist()


def refused(say: Any, kind: type[SchedirError], *words: str) -> None:
    with pytest.raises(kind) as error:
        say()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_wrong_segments_are_refused() -> None:
    shape = PipelineShape(2, 2)

    def compile_with_segments(segments: Any, **options: Any) -> Any:
        return lambda: compile(schedules.gpipe, shape, tp=2, stage_segments=segments, **options)

    nothing: list[Any] = [0, "fx", "g-g", 2.5, True, [1], (1, 2, 3), {}, "", "5,x"]
    for wrong in nothing:
        refused(compile_with_segments(wrong), UsageError, "stage_segments")
    refused(
        lambda: compile(schedules.gpipe, PipelineShape(3, 2), tp=2, stage_segments=3,
                        tied_weights=[(0, 1)]),
        UsageError, "stages 0, 1 share a weight", "stage 1",
    )  # fmt: skip
    program = compile(schedules.gpipe, shape, tp=2, stage_segments=3)
    refused(lambda: replace(program, tp=1), ShapeError, "but tp is 1")
    refused(
        lambda: replace(program, chunks_per_microbatch=3),
        ShapeError,
        "cannot be divided by chunks_per_microbatch 3",
    )
    refused(
        lambda: replace(program, segment_boundaries="fgf"),
        ShapeError,
        "3 letters, but 6 stages have 5 boundaries",
    )
    refused(
        lambda: replace(program, segment_boundaries="fggfg"),
        ShapeError,
        "stages 2 and 3",
        "different ranks",
    )
    refused(lambda: replace(program, segment_boundaries="fxxfg"), ShapeError, "fgfg-fgfg")
    refused(
        lambda: compile(extract_compute(program), stage_segments=2),
        UsageError,
        "has segments already",
    )
    for form in torch_csv.CSV_FORMATS:
        assert torch_csv.to_csv(compile(schedules.gpipe, shape, stage_segments=3), form)
    for shares, message in (
        ((1, -1, 1), "not be negative"),
        ((1, 1), "shares has 2 numbers"),
        ((0, 0, 0), "not all be 0"),
    ):
        refused(lambda s=shares: split_costs(FULL_COSTS, 3, shape, s), UsageError, message)


def edited(program: Program, old: str, new: str) -> Program:
    text = to_text(program, folded=False)
    assert text.count(old) == 1
    return from_text(text.replace(old, new))


def test_checker_requires_sums() -> None:
    program = compile(schedules.one_f_one_b, PipelineShape(1, 1), tp=2, stage_segments="gf")
    for sums in ("  tp_reduce_act 1.0\n", "  tp_reduce_grad 1.0\n"):
        refused(
            lambda s=sums: check(edited(program, s, "")),
            CompletenessError,
            "missing",
            sums.strip(),
        )
        refused(lambda s=sums: check(edited(program, s, 2 * s)), CompletenessError, "twice")
    wrong_order = edited(
        program, "  tp_reduce_act 1.0\n  F 1.0\n", "  F 1.0\n  tp_reduce_act 1.0\n"
    )
    refused(lambda: check(wrong_order), OrderError, "F 1.0", "tp_reduce_act 1.0")
    with_extra_sum = edited(
        program, "  tp_reduce_act 1.0\n", "  tp_reduce_act 1.0\n  tp_reduce_act 2.0\n"
    )
    refused(
        lambda: check(with_extra_sum),
        CompletenessError,
        "tp_reduce_act 2.0 is not needed",
        "has no such collective",
    )
