"""Tests of instructions that occur several times per stage and step, and of their slots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedir.compiler.compile import compile
from schedir.io import perfetto, torch_csv
from schedir.io.timeline_file import load_timeline, save_timeline
from schedir.ir.cost.costs import Costs
from schedir.ir.cost.sizes import Sizes
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import Program, SlotCounts
from schedir.ir.text_format import from_text, to_text
from schedir.predict.simulate import simulate
from schedir.predict.what_if import advise
from schedir.schedules import interleaved
from schedir.verify.check import check
from schedir.viz.html_page import html

TEXT = """schedir 1
program three
ranks 1  microbatches 1  stages_per_rank 3  placement loop
tp 1  dp 2  tied_weights no  clip_grad_norm no
zero 3

rank 0  unsharded_params 2
  unshard 0
  unshard 1
  F 0.0
  reshard 0
  unshard 2
  F 1.0
  reshard 1
  unshard 1.1
  F 2.0
  B 2.0
  reduce_scatter 2
  reshard 2
  unshard 0.1
  B 1.0
  reduce_scatter 1
  reshard 1.1
  B 0.0
  reduce_scatter 0
  reshard 0.1
  step
"""


def test_text_numbers_occurrences() -> None:
    program = check(from_text(TEXT))
    assert from_text(to_text(program)) == program and to_text(program, folded=False) == TEXT
    turns = [i for i in program.streams[0] if i.op is Opcode.Unshard]
    assert [i[1:] for i in turns] == [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1)]


@pytest.mark.parametrize("time", [0.0, 0.25, 9.0])
def test_unshard_waits_for_reshard_that_frees_slot(time: float) -> None:
    """At most two stages are unsharded at any time, however early an unshard could start."""
    run = simulate(
        from_text(TEXT), Costs(F=1, B=2, unshard=time), sizes=Sizes(params=100, saved=10)
    )
    sides = {Opcode.Unshard: ("start", 1), Opcode.Reshard: ("end", -1)}
    changes = [(s[side[0]], side[1]) for s in run.spans if (side := sides.get(Opcode(s["op"])))]
    unsharded = 0
    for _, change in sorted(changes):
        unsharded += change
        assert 0 <= unsharded <= 2
    assert unsharded == 0
    (curve,) = run.memory
    assert max(curve.by_kind["unsharded weights"]) == 200 and max(curve.by_kind["saved"]) == 30
    assert run.span == {0.0: 9, 0.25: 9.25, 9.0: 5 * 9 + 2}[time]


def test_second_unshard_waits_for_reshard_of_same_stage() -> None:
    """A stage has one buffer for its unsharded weights, however many slots there are."""
    program = from_text(TEXT.replace("rank 0  unsharded_params 2\n", "rank 0\n"))
    run = simulate(program, Costs(F=10, B=20))
    spans_by_text = {str(i): run.spans[k] for k, i in enumerate(program.streams[0])}
    for stage, occurrence in ((0, 1), (1, 1)):
        before = spans_by_text[f"reshard {stage}"]["end"]
        assert spans_by_text[f"unshard {stage}.{occurrence}"]["start"] >= before > 0
    assert spans_by_text["unshard 2"]["start"] == 0


def compile_with_slots() -> Program:
    """Return a compiled program with two slots for unsharded weights."""
    program = compile(
        interleaved, PipelineShape(2, 4, 2), zero=3, dp=2, clip_grad_norm=True, debug=True
    )
    return replace(program, slots=(SlotCounts.unspecified()._replace(unsharded_params=2),) * 2)


def test_all_outputs_support_occurrences(tmp_path: object) -> None:
    """Text, pictures, files and explanations support these instructions."""
    program, costs = compile_with_slots(), Costs(F=2, B=3, unshard=0.5, reduce_scatter=0.5)
    assert from_text(to_text(program)) == program == check(program)
    run = simulate(program, costs, sizes=Sizes(params=100, saved=10))
    plain = simulate(compile(interleaved, PipelineShape(2, 4, 2)), costs)
    assert run.peak_in_flight.tolist() == plain.peak_in_flight.tolist()
    assert '"unshard 0"' in perfetto.to_json(run) and "unshard" in html(run)
    save_timeline(run, f"{tmp_path}/x.timeline")
    assert load_timeline(f"{tmp_path}/x.timeline").program == program
    assert torch_csv.to_csv(program).startswith("0F0")
    advise(run, costs)
    assert run.idle is not None and run.critical_path.size
