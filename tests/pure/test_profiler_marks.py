"""The names of ranges: what is written of an instruction is read from it."""

from hypothesis import given
from hypothesis import strategies as st

from schedir.io.profiler_range_names import NamedInstruction, RangeName, mark_of, marks, read_mark
from schedir.ir.isa.instructions import ROWS, Instr, Opcode, Scope
from schedir.ir.pipeline.pipeline_shape import MAX_MICROBATCHES, MAX_STAGES


@given(
    st.sampled_from(Opcode),
    st.integers(0, MAX_STAGES - 1),
    st.integers(0, MAX_MICROBATCHES - 1),
    st.booleans(),
)
def test_names_are_read_as_they_are_written(op: Opcode, stage: int, mb: int, joined: bool) -> None:
    instr = Instr(op, 0 if ROWS[op].per is Scope.RANK else stage, mb)
    name = mark_of(instr, joined)
    assert marks(name)
    assert read_mark(name) == RangeName((NamedInstruction(*instr),), joined=joined)
