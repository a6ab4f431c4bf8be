"""Tests that printed programs parse, and that errors have a line and a column."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedir.compiler.compile import compile, lower
from schedir.errors import CompletenessError, ParseError, ShapeError
from schedir.ir.pipeline.pipeline_shape import PipelineShape
from schedir.ir.program import HEADER_FIELDS, Program, Stream
from schedir.ir.text_format import from_text, to_text
from schedir.passes.communication.transfer_overlap import group_opposite_transfers
from schedir.retired_names import RENAMED_FIELDS
from schedir.schedules import gpipe, interleaved, one_f_one_b
from schedir.testing import compute_programs, tied_weights
from schedir.verify.check import check


@given(compute_programs(), st.booleans(), st.booleans(), st.data())
def test_printed_program_parses(
    draft: Program, lowered: bool, grouped: bool, data: st.DataObject
) -> None:
    program = replace(
        draft, tp=2, tied_weights=data.draw(tied_weights(draft.shape)), clip_grad_norm=grouped
    )
    program = lower(program) if lowered else program
    program = group_opposite_transfers(program) if grouped else program
    for folded in (True, False):
        parsed = from_text(to_text(program, folded))
        assert parsed == program
        assert parsed.digest == program.digest


@given(st.lists(st.integers(0, 2**57 - 1), max_size=40), st.integers(1, 3))
def test_random_instructions_round_trip(words: list[int], period: int) -> None:
    """Use all instructions of the grammar in any order, also of programs that are not legal."""
    from schedir.ir.isa.instructions import INSTRUCTIONS, Scope

    instruction_words: list[int] = []
    for word in words * period:
        op, stage, mb = (word >> 48 & 0xFF) % 16, word >> 32 & 0xFFFF, word & 0xFFFF
        per = INSTRUCTIONS[op].scope
        stage, mb = (0 if per is Scope.RANK else stage), (mb if per is Scope.MICROBATCH else 0)
        instruction_words.append(
            op << 48 | stage << 32 | mb | (word & 1 << 56 if instruction_words else 0)
        )
    program = Program("any", PipelineShape(1, 1), (Stream(np.array(instruction_words, np.int64)),))
    for folded in (True, False):
        assert from_text(to_text(program, folded)) == program


def test_text_length_does_not_grow_with_microbatches() -> None:
    def count_lines(m: int) -> int:
        return to_text(compile(one_f_one_b, PipelineShape(4, m))).count("\n")

    assert count_lines(4000) == count_lines(40)
    program = compile(interleaved, PipelineShape(4, 64, 2))
    assert to_text(program).count("\n") == to_text(
        compile(interleaved, PipelineShape(4, 640, 2))
    ).count("\n")


def test_text_accepts_comments_blank_lines_and_steps() -> None:
    program = from_text(
        "schedir 1  # format\nprogram mine\nranks 1\nmicrobatches 4   placement loop\n\n"
        "rank 0\n  2 x  F 0.0+2; F 0.1+2   # pairs\n  # nothing\n  4 x B 0.3-\n"
    )
    assert [str(i) for i in program.streams[0]] == [
        "F 0.0", "F 0.1", "F 0.2", "F 0.3", "B 0.3", "B 0.2", "B 0.1", "B 0.0",
    ]  # fmt: skip


HEAD = "schedir 1\nprogram x\nranks 1  microbatches 2\n"


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        ("2", "another version of schedir wrote the file"),
        ("0", "another version of schedir wrote the file"),
        ("1.0", "the first line must be 'schedir 1'"),
        ("v1", "the first line must be 'schedir 1'"),
        ("", "the first line must be 'schedir 1'"),
    ],
)
def test_wrong_format_number_has_hint(number: str, hint: str) -> None:
    with pytest.raises(ParseError, match=f"the format must be 1, not '{number}'") as caught:
        from_text(f"schedir {number}\n")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("", 1, 1),
        ("program x\n", 1, 1),
        ("schedir 2\n", 1, 9),
        ("schedir 1\nprogram x\nranks 1\nrank 0\n", 3, 1),
        ("schedir 1\nprogram x\nranks 1  microbatchs 2\n", 3, 10),
        ("schedir 1\n", 1, 1),
        ("schedir 1\nprogram\n", 2, 1),
        ("schedir 1\nprogram x\nprogram y\n", 3, 1),
        ("schedir 1\nprograms x\n", 2, 1),
        ("schedir 1\nprogram a\0b\nranks 1  microbatches 2\nrank 0\n", 2, 9),
        ("schedir 1\nprogram x\nranks 1  microbatches\n", 3, 10),
        ("schedir 1\nprogram x\nmicrobatches 2  ranks -1\n", 3, 23),
        ("schedir 1\nprogram x\nmicrobatches 2  ranks 0\n", 3, 23),
        ("schedir 1\nprogram x\nranks 2  microbatches " + 20 * "9" + "\n", 3, 23),
        ("schedir 1\nprogram x\nranks 2  microbatches 9999999\n", 3, 23),
        ("schedir 1\nprogram x\nranks 2  microbatches 2  placement ring\n", 3, 36),
        ("schedir 1\nprogram x\nranks 2  microbatches 2  placement 0,2\n", 3, 36),
        ("schedir 1\nprogram x\nranks 9999  microbatches 2  stages_per_rank 9999\n", 3, 7),
        ("schedir 1\nprogram x\nranks 2  microbatches 2  tp -1\n", 3, 29),
        ("schedir 1\nprogram x\nranks 1  microbatches two\n", 3, 23),
        ("schedir 1\nprogram x\nranks 1  ranks 1\n", 3, 10),
        ("schedir 1\nprogram x\nranks 2  microbatches 2  placement 0,x\nrank 0\n", 3, 36),
        ("schedir 1\nprogram x\nranks 2  microbatches 2  tied maybe\nrank 0\n", 3, 31),
        (HEAD, 3, 1),
        (HEAD + "rank 1\n", 4, 6),
        (HEAD + "rank 0\nrank 1\n", 5, 6),
        (HEAD + "rank 0\n  F 0.0; G 0.1\n", 5, 10),
        (HEAD + "rank 0\n  F 0\n", 5, 3),
        (HEAD + "rank 0\n  step 0.0\n", 5, 3),
        (HEAD + "rank 0\n  0 x  F 0.0\n", 5, 3),
        (HEAD + "rank 0\n  F 0.0;; F 0.1\n", 5, 9),
        (HEAD + "rank 0\n  F 0.0\n  & F 0.1\n", 6, 3),
        (HEAD + "rank 0\n  2 x  & F 0.0+\n", 5, 8),
        (HEAD + "rank 0\n  F 0.0 &\n", 5, 10),
        (HEAD + "rank 0\n  F 99999.0\n", 5, 3),
        (HEAD + "rank 0\n  3 x  F 0.1-\n", 5, 1),
        (HEAD + "rank 0\n  999999999 x  F 0.0+\n", 5, 1),
        (HEAD + "rank 0\nF 0.0\n", 5, 1),
    ],
)
def test_parse_errors_have_line_and_column(text: str, line: int, column: int) -> None:
    with pytest.raises(ParseError) as caught:
        from_text(text)
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize("value", ["-1", "0", "99999999", "9" * 20, "9" * 5000])
def test_out_of_range_numbers_have_range_error(value: str) -> None:
    with pytest.raises(ParseError) as caught:
        from_text(f"schedir 1\nprogram x\nranks {value}  microbatches 2\n")
    assert "must be an integer" not in caught.value.fact and len(caught.value.fact) < 80


@given(st.text(st.characters(), max_size=8))
def test_program_name_round_trips_or_is_refused(name: str) -> None:
    try:
        program = Program(name, PipelineShape(1, 1), (Stream(np.zeros(1, np.int64)),))
    except ShapeError:
        return
    assert from_text(to_text(program).encode().decode()).name == name


@pytest.mark.parametrize("bad", ["", " x", "x ", "a#b", "a\nb", "a\x85b", "a\u2028b", "\ud800", 3])
def test_impossible_program_name_is_refused(bad: Any) -> None:
    with pytest.raises(ShapeError):
        Program(bad, PipelineShape(1, 1), ())


def test_byte_order_mark_is_ignored() -> None:
    program = compile(one_f_one_b, PipelineShape(2, 4))
    assert from_text("\ufeff" + to_text(program)) == program


def test_digest_depends_on_program_but_not_name() -> None:
    shape = PipelineShape(2, 4)
    program = compile(one_f_one_b, shape)
    assert program.digest == replace(program, name="other").digest
    others = [
        compile(gpipe, shape),
        compile(one_f_one_b, shape, tp=2),
        compile(one_f_one_b, shape, dp=2),
        compile(one_f_one_b, PipelineShape(2, 5)),
        compile(partial(interleaved, v=1), shape),
        group_opposite_transfers(program),
    ]
    assert len({program.digest, *(o.digest for o in others)}) == 1 + len(others)


def test_program_with_extra_stream_prints() -> None:
    """The author of the program can then see what `check` refuses."""
    program = compile(one_f_one_b, PipelineShape(2, 4), buffer_sharing="minimal")
    with_extra_stream = replace(program, streams=(*program.streams, program.streams[1]))
    assert "rank 2\n" in to_text(with_extra_stream)
    assert "rank 2  act_in" not in to_text(with_extra_stream)
    with pytest.raises(CompletenessError, match="3 Streams for 2 ranks"):
        check(with_extra_stream)


def test_renamed_header_keys_are_read() -> None:
    """Renamed keys and values of the header are read, and no new key is also an old one."""
    shape = PipelineShape(2, 8, optimizer_steps=2, weight_delay=1)
    program = compile(one_f_one_b, shape, tp=2, sequence_parallel=True, tied_weights=True)
    sharded = compile(
        one_f_one_b, PipelineShape(2, 4), dp=2, zero=2, reduce_scatter_at="each_backward"
    )
    for original in (program, sharded):
        old = to_text(original)
        for before, new_name in RENAMED_FIELDS.items():
            old = re.sub(rf"\b{new_name} (?=[^;\n]*\n)", f"{before} ", old)
        old = old.replace("each_backward", "turn")
        assert old != to_text(original) and from_text(old) == original
    assert {f.name for f in HEADER_FIELDS}.isdisjoint(RENAMED_FIELDS)


def test_missing_list_of_rank_gets_hint() -> None:
    text = to_text(compile(one_f_one_b, PipelineShape(2, 2)))
    with pytest.raises(ParseError, match="the header has ranks 2, but the text has 1") as caught:
        from_text(text[: text.index("\nrank 1")])
    assert caught.value.hint == "add the line 'rank 1' and its instructions"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("send_fwd", "send_act"),
        ("recv_forward", "recv_act"),
        ("send_backward", "send_grad"),
        ("recv_bwd", "recv_grad"),
        ("SEND_F", "send_act"),
        ("forward", "F"),
        ("bwd", "B"),
        ("all_reduce", "reduce_grads"),
        ("optimizer_step", "step"),
    ],
)
def test_instruction_names_of_other_projects_get_hint(name: str, expected: str) -> None:
    text = to_text(compile("one_f_one_b", ranks=2, microbatches=2)).replace(
        "send_act 0.0", f"{name} 0.0", 1
    )
    with pytest.raises(ParseError, match=f"there is no instruction '{name} 0.0") as caught:
        from_text(text)
    assert caught.value.hint == f"did you mean {expected!r}?"
