"""Writes the pages that the source already knows: `python docs/generate.py`.

A test compares the committed pages with what this makes.
"""

from __future__ import annotations

from pathlib import Path

from schedir import Plan, compile, show, text
from schedir.graph import MODELS
from schedir.ops import ROWS, Token
from schedir.schedules import one_f_one_b

HERE = Path(__file__).parent

IR = """\
# The instructions

Generated from `schedir/ops.py` by `python docs/generate.py`; do not edit.

A program is one list of instructions per pipeline rank, its *Stream*. An instruction is an
opcode with the stage and the microbatch that it works on. Each rank has a few in-order queues,
its *lanes*; the Streams say in which order instructions enter them.

An instruction starts when the one before it in its lane has ended, every value that it needs
has been given, and, for transfers and collectives, its partners start too.

{table}

{lines}

The zero-bubble papers call BackwardInput "B"; here, as in torch, B is the whole backward.
`Scatter` and `Gather` (and their twins for gradients) are the two halves of ScatterGather: one
boundary tensor that every tensor-parallel rank holds in full crosses as 1/t from each.

## Values

Each exists once per (stage, microbatch), except WGRAD, GRAD (per stage) and NORM, PARAMETERS
(per rank): {tokens}. Neighbouring stages on one rank hand activations and gradients over
without messages: there, ACT_OUT of one is ACT_IN of the other.

## Progress models

How transfers queue decides what can hang. `check(program, model)` proves a program for one of
them, and the transport that runs it names the one it gives.

| model | transfers queue per | who behaves so |
| --- | --- | --- |
| `edge` | directed edge, activations and gradients apart | one 2-rank group per directed edge; Gloo with a tag per lane |
| `pair` | unordered pair of ranks | torch's lazily created point-to-point communicators |
| `device` | rank | one communicator for the pipeline, `batch_isend_irecv` |
| `serial` | rank, compute included | blocking sends; the strictest |

Whatever `schedir.compile` makes finishes under all of them ({models}).

## Text

`schedir.show` and `schedir.parse` are one grammar, and `parse(show(p)) == p`:

```
{program}```

- The header gives the format, the name, the plan and its traits; `placement` is `loop`, `vee`
  or the rank of each stage, `0,1,1,0`. What is left out has the default of `Plan` and `Program`.
- `F 1.0` is Forward of stage 1, microbatch 0. What exists once per stage or once per rank is
  written without what it lacks: `reduce_grads 1`, `step`.
- `4 x  F 0.0+; B 0.0+` repeats a line: `+` is one microbatch more each turn, `+4` four more,
  `-` one less. Folding lives in the text only; Streams are flat.
- `send_act 0.1 & recv_grad 0.0` joins instructions that are issued as one: transfers, or two
  computes that run together.
- `#` begins a comment. The format number is {format}; a reader refuses another.
"""


def ir() -> str:
    """The page about instructions."""

    def tokens(some: tuple[Token, ...]) -> str:
        return ", ".join(t.name.lower() for t in some) or "-"

    table = ["| name | text | lane | once per | needs | gives | frees |", "| --- " * 7 + "|"]
    lines = []
    for row in ROWS:
        table.append(
            f"| {row.op.name} | `{row.text}` | {row.lane.name.lower()} | {row.per.value or 'rank'} "
            f"| {tokens(row.needs)} | {tokens(row.gives)} | {tokens(row.frees)} |"
        )
        lines.append(f"- **{row.op.name}**: {row.doc}")
    return IR.format(
        table="\n".join(table),
        lines="\n".join(lines),
        tokens=", ".join(t.name for t in Token),
        models=", ".join(f"`{m}`" for m in MODELS),
        program=show(compile(one_f_one_b, Plan(2, 8))),
        format=text.FORMAT,
    )


PAGES = {"ir.md": ir}


if __name__ == "__main__":
    for name, page in PAGES.items():
        HERE.joinpath(name).write_text(page())
        print(f"wrote docs/{name}")
