"""Compress: send activations in fewer bytes."""

from __future__ import annotations

from schedir.ir.isa.instructions import Form, Opcode
from schedir.passes.communication.scatter_gather import insert_form_changes
from schedir.passes.pass_types import Pass

PASSES = (
    Pass(
        "compress",
        "messages",
        lambda program, options: insert_form_changes(program, Form.PACKED),
        should_run=lambda program, options: bool(options.extra_options.get("compress")),
        option_names=("compress",),
        opcodes=(Opcode.Compress, Opcode.Decompress),
        order=2,  # after the scatters
    ),
)
