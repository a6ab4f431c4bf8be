"""Tests that the name of a range can be read back as its instruction."""

from hypothesis import given
from hypothesis import strategies as st

from schedir.io.profiler_range_names import (
    NamedInstruction,
    RangeName,
    format_range_name,
    is_instruction_range,
    parse_range_name,
)
from schedir.ir.isa.instructions import INSTRUCTIONS, Instr, Opcode, Scope
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, MAX_STAGES


@given(
    st.sampled_from(Opcode),
    st.integers(0, MAX_STAGES - 1),
    st.integers(0, MAX_MICROBATCHES - 1),
    st.booleans(),
)
def test_range_name_round_trips(op: Opcode, stage: int, mb: int, joined: bool) -> None:
    instr = Instr(op, 0 if INSTRUCTIONS[op].scope is Scope.RANK else stage, mb)
    name = format_range_name(instr, joined)
    assert is_instruction_range(name)
    assert parse_range_name(name) == RangeName((NamedInstruction(*instr),), is_joined=joined)
