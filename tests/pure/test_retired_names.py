"""A retired option or key is refused, and the error names its replacement."""

import pytest

import schedir
from schedir import PipelineShape
from schedir.errors import ParseError, SchedirError, UsageError
from schedir.retired_names import RETIRED_HINTS


def hint(error: SchedirError) -> str:
    assert error.hint in RETIRED_HINTS.values()
    return error.hint


def test_an_option_of_compile() -> None:
    with pytest.raises(UsageError) as refused:
        schedir.compile(schedir.schedules.gpipe, PipelineShape(2, 2), open=True)
    assert "more microbatches" in hint(refused.value)


def test_a_key_of_a_program() -> None:
    text = schedir.to_text(schedir.compile(schedir.schedules.gpipe, PipelineShape(2, 2)))
    with pytest.raises(ParseError) as refused:
        schedir.from_text(text.replace("ranks 2", "ranks 2  open yes"))
    assert "more microbatches" in hint(refused.value)
