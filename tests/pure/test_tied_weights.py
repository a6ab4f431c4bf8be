"""Tests of ties, which are found in anything with named parameters, and kept by programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import schedir
from schedir import PipelineShape, TiedWeights, from_text, to_text
from schedir.__main__ import main
from schedir.errors import ParseError, ShapeError, UsageError
from schedir.ir.isa.instructions import Opcode
from schedir.ir.pipeline.tied_weights import number_tied_groups
from schedir.schedules import dualpipe, one_f_one_b, zb_v
from tests.commands import run_refused_command


class Weight:
    def __init__(self, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad


class Module:
    """An object with named parameters, which is all that a module needs."""

    def __init__(self, **named: Weight) -> None:
        self.named = named

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        assert not remove_duplicate
        yield from self.named.items()


UNTIED, TIED, FROZEN = Weight(), Weight(), Weight(requires_grad=False)
MODEL = Module(a=UNTIED, wte=TIED, lm_head=TIED, one=FROZEN, other=FROZEN)


def test_ties_are_found_in_stages() -> None:
    stages = [Module(w=TIED, x=FROZEN), Module(a=UNTIED), Module(v=TIED, u=TIED, x=FROZEN)]
    ties = schedir.find_tied_weights(stages)
    assert ties == TiedWeights((((0, "w"), (2, "v")),)) and ties.stages == ((0, 2),)
    assert schedir.find_tied_weights(dict(enumerate(stages))) == ties
    assert not schedir.find_tied_weights(stages[:2])


def test_ties_of_model_are_located_by_object_and_name() -> None:
    ties = schedir.find_tied_weights(MODEL)
    assert ties.names == (("wte", "lm_head"),)
    shared = [Module(w=TIED), Module(a=UNTIED), Module(v=TIED)]
    assert ties.locate_in_stages(shared) == TiedWeights((((0, "w"), (2, "v")),))
    copies = [Module(wte=Weight()), Module(a=Weight()), Module(lm_head=Weight())]
    assert ties.locate_in_stages(copies) == TiedWeights((((0, "wte"), (2, "lm_head")),))
    weight = Weight()
    assert not ties.locate_in_stages([Module(a=UNTIED), Module(wte=weight, lm_head=weight)])


def test_lost_tie_is_refused() -> None:
    ties = schedir.find_tied_weights(MODEL)
    with pytest.raises(UsageError, match="no stage has lm_head"):
        ties.locate_in_stages([Module(wte=Weight()), Module(head=Weight())])
    with pytest.raises(
        UsageError, match="one weight in the model, but two different weights in stage 0"
    ):
        ties.locate_in_stages([Module(wte=Weight(), lm_head=Weight())])


def test_true_ties_first_and_last_stage() -> None:
    shape = PipelineShape(4, 4)
    programs = [
        schedir.compile(one_f_one_b, shape, tied_weights=tied)
        for tied in (True, ((3, 0),), TiedWeights((((0, "w"), (3, "v")), ((0, "b"), (3, "c")))))
    ]
    assert {p.digest for p in programs} == {programs[0].digest}
    assert all(p.tied_weights == ((0, 3),) and "tied_weights yes" in to_text(p) for p in programs)
    assert schedir.compile(one_f_one_b, PipelineShape(1, 2), tied_weights=True).tied_weights == ()


def test_other_ties_round_trip_through_text() -> None:
    program = schedir.compile(one_f_one_b, PipelineShape(6, 6), tied_weights=((4, 1), (0, 2, 3)))
    assert "tied_weights 0=2=3,1=4  clip_grad_norm no" in to_text(program)
    assert from_text(to_text(program)) == program
    reductions = [str(i) for s in program.streams for i in s if i.op is Opcode.ReduceTied]
    assert reductions == [f"reduce_tied {s}" for s in range(5)]
    untied = schedir.compile(one_f_one_b, PipelineShape(6, 6))
    assert (
        len({program.digest, untied.digest, replace(program, tied_weights=((1, 4),)).digest}) == 3
    )


@pytest.mark.parametrize(
    ("tied_text", "message"),
    [
        ("0=6", "tied_weights has 0=6, but the stages are 0 to 5"),
        ("0=0", "each set of tied_weights needs two stages or more, but one is [0]"),
        ("0=", "tied_weights must be yes, no, or stages like 0=3,1=2, not '0='"),
        ("0=\u0663", "tied_weights must be yes, no, or stages like 0=3,1=2, not '0=\u0663'"),
    ],
)
def test_wrong_tie_text_is_refused(tied_text: str, message: str) -> None:
    text = to_text(schedir.compile(one_f_one_b, PipelineShape(6, 6))).replace(
        "tied_weights no", f"tied_weights {tied_text}"
    )
    with pytest.raises(ParseError) as caught:
        from_text(text)
    line = text.splitlines()[caught.value.line - 1]
    assert caught.value.fact == message and line[caught.value.column - 1 :].startswith(tied_text)


@pytest.mark.parametrize("tied", [(0, 3), "ends", 3, ((0,),), ((0, 4),), ((-1, 2),)])
def test_invalid_tie_is_refused(tied: Any) -> None:
    with pytest.raises(ShapeError):
        schedir.compile(one_f_one_b, PipelineShape(4, 4), tied_weights=tied)


@pytest.mark.parametrize(
    ("shape", "tied", "party"),
    [
        (PipelineShape(4, 4), ((0, 3),), [0, 1, 2, 0]),
        (PipelineShape(4, 4), ((0, 1), (2, 3)), [0, 0, 2, 2]),
        (PipelineShape(4, 4), ((0, 1), (1, 2)), [0, 0, 0, 3]),
        (PipelineShape(2, 4, 2, "vee"), ((0, 3), (1, 2)), [0, 1]),
        (PipelineShape(2, 4, 2, "vee"), ((0, 3), (1, 3)), [0, 0]),
        (PipelineShape(4, 8, placement="mirror"), ((0, 3),), [0, 1, 2, 3]),
        (PipelineShape(4, 8, placement="mirror"), ((0, 1),), [0, 0, 0, 0]),
    ],
)
def test_ranks_of_tied_reduction(shape: PipelineShape, tied: Any, party: list[int]) -> None:
    assert number_tied_groups(tied, shape) == party
    schedule = {"vee": zb_v, "mirror": dualpipe}.get(str(shape.placement), one_f_one_b)
    program = schedir.compile(schedule, shape, tied_weights=tied)
    (node,) = {
        tuple(
            schedir.analysis.dependency_graph.Graph(program).node[
                schedir.ir.instruction_index.InstructionIndex(program).op == Opcode.ReduceTied
            ]
        )
    }
    held = [
        r
        for r, rank_stages in enumerate(shape.stages_on_rank)
        if {*rank_stages} & {s for t in tied for s in t}
    ]
    assert len({*node}) == len({party[r] for r in held})


def test_tied_weights_option_of_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["print", "one_f_one_b", "-O", "tied_weights=1=2"]) == 0
    text = capsys.readouterr().out
    assert "tied_weights 1=2" in text and from_text(text).tied_weights == ((1, 2),)
    path = str(tmp_path / "one.sched")
    Path(path).write_text(text)
    assert main(["check", path, "-O", "tied_weights=1=2"]) == 0
    assert "complete" in capsys.readouterr().out
    assert "has tied_weights 1=2, not yes" in run_refused_command(
        capsys, "check", path, "-O", "tied_weights"
    )
    assert "has tied_weights 1=2, not 0=1" in run_refused_command(
        capsys, "check", path, "-O", "tied_weights=0=1"
    )
