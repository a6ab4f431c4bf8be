"""Compress: activations cross between ranks in fewer bytes."""

from __future__ import annotations

from schedir.ir.isa.instructions import Form
from schedir.passes.communication.scatter_gather import with_form
from schedir.passes.pass_types import Pass

PASSES = (
    Pass(
        "compress",
        "messages",
        lambda program, options: with_form(program, Form.PACKED),
        wanted=lambda program, options: bool(options.more.get("compress")),
        options=("compress",),
        order=2,  # behind the scatters
    ),
)
