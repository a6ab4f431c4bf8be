"""Writes the pages that the source already knows: `python docs/generate.py`.

A test compares the committed pages with what this makes.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from schedir import Costs, Plan, compile, schedules, show, simulate
from schedir.analysis.models import MODEL_ROWS, MODELS
from schedir.ir.ops import LANES, ROWS, TOKENS, Token
from schedir.ir.text import FORMAT
from schedir.schedules import one_f_one_b
from schedir.schedules.words import placed_for
from schedir.training.sections import heading, settings
from schedir.transports.registry import TRANSPORTS

HERE = Path(__file__).parent

IR = """\
# The instructions

<!-- Generated from `schedir/ir/ops.py` by `python docs/generate.py`; do not edit. -->

A program is one list of instructions per pipeline rank, its *Stream*. An instruction is an
opcode with the stage and the microbatch that it works on. Each rank has a few in-order queues,
its *lanes*; the Streams say in which order instructions enter them.

An instruction starts when the one before it in its lane has ended, every value that it needs
has been given, the slot that it fills has been left by its last reader, and, for transfers and
collectives, its partners start too.

{table}

{lines}

The zero-bubble papers call BackwardInput "B"; here, as in torch, B is the whole backward. With
`skips 0=3`, stage 3 takes a second value of stage 0 ([decision 29](decisions/29-skips.md)).
Unshard, Reshard and ReduceScatter are [ZeRO](zero.md)'s, and each turn of a stage has its own.
`Scatter` and `Gather` (and their twins for gradients) are the two halves of ScatterGather: one
boundary tensor that every tensor-parallel rank holds in full crosses as 1/t from each ("Efficient
Large-Scale Language Model Training on GPU Clusters", SC21, section 4.1). A gather runs beside what
computes, on a lane and a communicator of its own, from when its message is there until the
instruction that takes the boundary in ([decision 15](decisions/15-gathers.md)).

What that is worth, as `simulate` predicts it under `edge` with `overlap=True`: 8 ranks, 64 microbatches, 32
layers of hidden size 12288 in all, each microbatch one sequence of 2048 in bfloat16, tp 8. By
arithmetic, and not measured: a layer's forward takes {forward} ms (at 650 TFLOP/s; I and W the same), the
message of a slice {send} ms (at 45 GB/s), a gather {gather} ms (at 370 GB/s). So much longer does a
step take than if gathers were free:

{gathers}

1F1B waits for nearly every message and for its gather, whatever the lane: its leads are too short to
have anything else to do meanwhile. That gathers share a node's links with what layers sum is not in
these figures.

## Values

What instructions hand to each other. "Found" says how the giver of a value is found, which is the nearest
instruction that gives it and stands earlier in the Stream ([decision 22](decisions/22-one-flow-of-values.md)).

{values}

WGRAD is one sum, to which all who give it add: so of several updates each is stepped before anything is added
to the next. Where a stage has several holders, each has its own WGRAD and GRAD. Neighbouring stages on one rank
hand activations and gradients over without messages: there, ACT_OUT of one is ACT_IN of the other.

## Lanes

{lanes}

## Progress models

How transfers queue decides what can hang. `check(program, model)` proves a program for one of
them, and the transport that runs it names the one it gives.

{rules}

Whatever `schedir.compile` makes finishes under all of them ({models}).
What torch gives, what small messages do, and first uses: [more than queues](progress-models.md).

On CPUs, hosts block: a rank that waits for what a compute needs issues nothing meanwhile, not even a
send that another rank waits for. `check(program, model, blocks=True)` and `schedir check --blocks`
prove a program for such hosts; what finishes under `serial` does so there, too.

On GPUs hosts do not block, but at times wait for the whole device: to allocate memory, or to load a
kernel at its first use. A receive that was posted early, and spins, is then waited for by the host
that should issue what it needs. `check(program, model, device_waits=True)` and `schedir check
--device-waits` prove that a program lives through that anywhere; with `overlap` under `edge` most do
not, and so executors over NCCL first run steps that are undone, in one order that all ranks share.

## Text

`schedir.show` and `schedir.parse` are one grammar, and `parse(show(p)) == p`:

```
{program}```

- The header gives the format, the name, the plan and its traits; `placement` is `loop`, `vee`,
  `mirror`, `mirror-vee` or the rank of each stage, `0,1,1,0`, or a row of these for each holder,
  `0,1,1,0/1,0,0,1`. What is left out has the default of `Plan` and `Program`.
- `F 1.0` is Forward of stage 1, microbatch 0. What exists once per stage or once per rank is
  written without what it lacks: `reduce_grads 1`, `step`. Where a program has several `updates`,
  the number of the update follows if it is not 0: `reduce_grads 1.3`, `step 3`.
- `4 x  F 0.0+; B 0.0+` repeats a line: `+` is one microbatch more each turn, `+4` four more,
  `-` one less. Folding lives in the text only; Streams are flat.
- `send_act 0.1 & recv_grad 0.0` joins instructions that are issued as one: transfers, or two
  computes that run together.
- `rank 0  act_in 2  act_out 2  grad_in 1  grad_out 1` says how many static slots the values of a
  rank share (`compile(..., slots=...)`); without numbers each value has its own.
- `#` begins a comment. The format number is {format}; a reader refuses another.
"""  # noqa: E501


FORWARD, SEND, GATHER = 1.45, 0.14, 0.12  # ms: of a layer, of a slice, of a boundary
GATHERED = {"one_f_one_b": 1, "eager_1f1b": 1, "zb_h1": 1, "zb_v": 2, "interleaved": 4}


def gathers() -> str:
    """What it costs to gather on the compute lane, as part of F, B and I, and on its own."""
    rows = []
    for name, v in GATHERED.items():
        plan, time = (
            Plan(8, 64, v, placed_for(getattr(schedules, name))[0] or "loop"),
            FORWARD * 4 / v,
        )
        crosses = [int(a != b) for a, b in pairwise(plan.rank_of.tolist())]
        ahead, back = (
            tuple(time + GATHER * one for one in some) for some in ([0, *crosses], [*crosses, 0])
        )
        free = Costs(F=time, I=time, W=time, send=SEND)
        whole = tuple(time + one for one in back)
        spans = []
        for costs in (free, replace(free, F=ahead, I=back, B=whole), replace(free, gather=GATHER)):
            program = compile(
                getattr(schedules, name), plan, tp=8, model="edge", costs=costs, overlap=True
            )
            spans.append(simulate(program, costs, model="edge").span)
        more = (f"{span / spans[0] - 1:.1%}" for span in spans[1:])
        rows.append([f"`{name}`", str(v), *more])
    return table(["schedule", "stages per rank", "on the compute lane", "on its own"], rows)


WAITS = "waits for what it needs, and starts it"
HOSTS = {"runs": "runs it", "waits": WAITS, "starts": "starts it"}


def ir() -> str:
    """The page about instructions."""

    def tokens(some: tuple[Token, ...]) -> str:
        return ", ".join(t.name.lower() for t in some) or "-"

    rows, values = [], []
    for row in ROWS:
        said = [row.op.name, f"`{row.text}`", row.lane.name.lower(), row.per.value or "rank"]
        rows.append([*said, *map(tokens, (row.needs, row.gives, row.frees)), row.cost or "-"])
    for value in TOKENS:
        said = [value.token.name, value.words, value.per.value or "rank"]
        values.append([*said, value.found.value, value.size or "-"])
    head = ["name", "text", "lane", "once per", "needs", "gives", "frees", "priced by"]
    lanes = [[lane.lane.name.lower(), lane.doc, HOSTS[lane.host]] for lane in LANES]
    rules = [[f"`{model.name}`", model.doc, model.who] for model in MODEL_ROWS]
    return IR.format(
        table=table(head, rows),
        lines="\n".join(f"- **{row.op.name}**: {row.doc}" for row in ROWS),
        gathers=gathers(),
        forward=FORWARD,
        send=SEND,
        gather=GATHER,
        values=table(["value", "is", "one per", "found:", "bytes"], values),
        lanes=table(["lane", "has", "a host that blocks"], lanes),
        rules=table(["model", "transfers", "who behaves so"], rules),
        models=", ".join(f"`{m}`" for m in MODELS),
        program=show(compile(one_f_one_b, Plan(2, 8))),
        format=FORMAT,
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


CONFIG = """\
# The configuration of a training run

<!-- Generated from `schedir/training/config.py` by `python docs/generate.py`; do not edit. -->

`schedir train CONFIG.toml` takes a TOML file. All settings may be left out, and
`--set section.name=value` says one on the command line: `--set pipeline.ranks=2`. What is wrong
is refused, with its line, before a process starts. `examples/demo.toml`, for one:

```toml
{demo}
```

{sections}

## Transports

What `train.transport` takes for each device, the best first, and the progress model that a program
must be proven for.

{transports}"""


def config_page() -> str:
    """docs/config.md: every section and its settings."""
    sections = ""
    for section, (about, own) in settings().items():
        rows = [[f"`{name}`", takes, f"`{usual}`" if usual else "-"] for name, takes, usual in own]
        shown = table(["setting", "takes", "default"], rows)
        sections += f"## {heading(section)}\n\n{about}\n\n{shown}\n\n"
    demo = (HERE.parent / "examples" / "demo.toml").read_text().strip()
    transports = table(
        ["device", "transport", "messages travel", "model"],
        [[row.device, f"`{row.name}`", row.doc, row.model] for row in TRANSPORTS.values()],
    )
    page = CONFIG.format(demo=demo, sections=sections.rstrip(), transports=transports)
    return page.rstrip() + "\n"


GALLERY = runpy.run_path(str(HERE / "gallery_page.py"))


PAGES: dict[str, Callable[[], str]] = {
    "ir.md": ir,
    "config.md": config_page,
    "design.md": runpy.run_path(str(HERE / "design_map.py"))["page"],
    "api.md": runpy.run_path(str(HERE / "api_page.py"))["page"],
    **runpy.run_path(str(HERE / "museum_page.py"))["PAGES"],
    **runpy.run_path(str(HERE / "planner_page.py"))["PAGES"],
    **runpy.run_path(str(HERE / "offload_page.py"))["PAGES"],
    **runpy.run_path(str(HERE / "parts_page.py"))["PAGES"],
    **runpy.run_path(str(HERE / "windows_page.py"))["PAGES"],
    **runpy.run_path(str(HERE / "which_schedule_page.py"))["PAGES"],
    **runpy.run_path(str(HERE / "schedules_page.py"))["PAGES"],
}
PAGES |= GALLERY["PAGES"]


if __name__ == "__main__":
    for name, page in PAGES.items():
        HERE.joinpath(name).parent.mkdir(exist_ok=True)
        HERE.joinpath(name).write_text(page())
        print(f"wrote docs/{name}")
