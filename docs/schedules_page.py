"""The page of the schedules, each with its law, and their pictures: see `generate.py`."""

from __future__ import annotations

import runpy
from functools import partial
from inspect import getdoc
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib import rc_context

from schedir import Costs, Plan, Timeline, compile, greedy, schedules, simulate, viz
from schedir.schedules.words import delay_for, placed_for, stages_per_rank_for

HERE = Path(__file__).parent
GALLERY = runpy.run_path(str(HERE / "gallery_page.py"))

SCHEDULES = """\
# The schedules

<!-- Generated from `schedir/schedules/` by `python docs/generate.py`; do not edit. -->

Every schedule is a function of a few words, and `schedir.compile(schedule, plan)` makes a
program of it. Figures here are of the same model cut for each: a microbatch takes a whole rank
F = I = W = 1 (B = 2), messages take no time, and memory counts activations of a whole rank.

**Bubble** is the idle share of all ranks from the first start to the last end. **In own span**
is the papers' rate: the idle share of the rank that needs longest from its own first start to
its own last end. It is what counts where ranks need not end together, which they must where
gradients are clipped by a global norm.

Memory does not count parameters: schedules of placements `mirror` and `mirror-vee` hold them
twice, and `pipedream_2bw`, which is shown with all microbatches in a run of one update per rank's
worth of them, keeps two versions.

## All, by memory and then by bubble

{all}

## The same at unequal costs

Bubble at 8 ranks and 32 microbatches, when F, I and W are not alike. Schedules that are made
slot by slot for F = I = W lose most.

{unequal}

## One by one

{each}
## A second door

`schedir.greedy(plan, prefer, in_flight, costs)`, for what no closed form describes:

{greedy}
"""

# In the order of the page: when to use each.
WHEN = {
    "gpipe": "As a yardstick, or with so few microbatches that memory is no matter.",
    "one_f_one_b": "The default where memory is short and messages are cheap.",
    "eager_1f1b": "Where messages are slow and there is memory for twice the lead.",
    "interleaved": "Where layers divide into more stages, links are fast and weights' gradients "
    "cannot be split off.",
    "looped_bfs": "Where weights are sharded, and gathered stage by stage.",
    "looped_dfs": "To see what the turns of `interleaved` save.",
    "wave": "With m = P, where the first and the last stage shall share a rank; else "
    "`interleaved` has the smaller bubble.",
    "zb_h1": "Instead of 1F1B wherever backwards can be split: a third of the bubble in the "
    "memory of its first rank.",
    "zb_h2": "Where memory is plenty and ranks need not end together.",
    "interleaved_zb": "Instead of `interleaved` where backwards can be split; it needs no vee.",
    "zb_v": "The least bubble in 1F1B's memory, where F, I and W are alike.",
    "v_half": "Where half of 1F1B's memory must do.",
    "v_min": "Where a third must do, and F, I and W are all but equal.",
    "dualpipe_v": "Where messages are long (expert parallelism), so that a pair run together is "
    "worth more than a small bubble.",
    "pipedream_2bw": "Where a gradient one update late does no harm: all updates of a run share "
    "the bubble of one, for one more copy of the weights.",
    "dualpipe": "As `dualpipe_v`, where parameters are few beside activations: half as many "
    "messages, for parameters held twice and one more reduction.",
    "bitpipe": "As `chimera`, with half of its bubble for nearly twice its messages, where layers "
    "divide into twice as many stages as ranks.",
    "chimera": "With m = P and whole backwards, where there is room for parameters twice.",
    "forward_only": "Evaluation and inference.",
}  # fmt: skip


def shape(name: str) -> tuple[str, int]:
    """Placement and stages per rank at which a schedule is shown."""
    schedule = getattr(schedules, name)
    return str(placed_for(schedule)[0] or "loop"), stages_per_rank_for(schedule)


def shown(
    name: str, ranks: int, microbatches: int, costs: tuple[float, ...] = (1.0, 1.0, 1.0)
) -> Timeline:
    """A schedule's predicted run; the costs of 1/ranks of the model, by how many stages that is."""
    placement, v = shape(name)
    delay = delay_for(getattr(schedules, name))
    updates = 1 if delay is None else microbatches // ranks
    plan = Plan(ranks, microbatches, v, placement, updates, delay or 0)
    F, I, W = (c * ranks / plan.stages for c in costs)
    priced = Costs(F=F, I=I, W=W)
    program = compile(getattr(schedules, name), plan, model="edge", costs=priced)
    return simulate(program, priced, model="edge")


def figures(name: str, ranks: int, microbatches: int) -> tuple[float, float, float]:
    """Peak memory, and the bubble in both measures."""
    timeline = shown(name, ranks, microbatches)
    longest = int(timeline.own_span.argmax())
    own = timeline.idle_in_own_span[longest] / timeline.own_span[longest]
    peak = timeline.peak_in_flight.max() if timeline.program.trains else 0
    return float(peak) * ranks / timeline.program.plan.stages, timeline.bubble, float(own)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def page() -> str:
    """docs/schedules.md."""
    assert {*WHEN} == {*schedules.__all__}
    sizes = ((4, 8), (8, 32))
    numbers = {name: [figures(name, *size) for size in sizes] for name in WHEN}

    def cells(name: str) -> list[str]:
        return [cell for memory, *idle in numbers[name]
                for cell in (f"{memory:g}", *(f"{share:.1%}" for share in idle))]  # fmt: skip

    trains = [name for name in WHEN if name != "forward_only"]
    by_memory = sorted(trains, key=lambda name: numbers[name][1])
    heads = [f"{what}, {P} x {m}" for P, m in sizes for what in ("memory", "bubble", "in own span")]
    rows = [[f"[`{n}`](#{n})", *map(str, reversed(shape(n))), *cells(n)] for n in by_memory]
    costs = ((1, 1, 1), (1, 1.2, 0.8), (1, 1.4, 0.6), (0.8, 1, 1.2), (1.2, 1, 0.8))
    unequal = [
        [f"`{name}`", *(f"{shown(name, 8, 32, c).bubble:.1%}" for c in costs)] for name in by_memory
    ]
    each = ""
    for name, when in WHEN.items():
        law = str(getdoc(getattr(schedules, name))).split("\n>>>")[0].strip()
        each += (
            f"### {name}\n\n{law}\n\n*When to use it.* {when}\n\n"
            f"![{name} on 4 ranks with 8 microbatches](images/schedules/{name}.svg)\n\n"
        )
        for (P, m), (memory, bubble, own) in zip(sizes, numbers[name], strict=True):
            each += f"- {P} ranks, {m} microbatches: memory {memory:g}, "
            each += f"bubble {bubble:.1%}, in own span {own:.1%}\n"
        each += "\n"
    return SCHEDULES.format(
        all=table(["schedule", "stages per rank", "placement", *heads], rows),
        unequal=table(
            ["schedule", *(f"F, I, W = {', '.join(map(str, c))}" for c in costs)], unequal
        ),
        each=each,
        greedy=str(getdoc(greedy)).split("\n>>>")[0].strip(),
    )


def picture(name: str) -> str:
    """A schedule at 4 ranks and 8 microbatches, as SVG."""
    with TemporaryDirectory() as folder, rc_context({"font.sans-serif": ["DejaVu Sans"]}):
        path = Path(folder) / "picture.svg"
        viz.save(viz.gantt(shown(name, 4, 8)), path)
        svg = path.read_text()
    return str(GALLERY["slim"](svg))


PAGES = {"schedules.md": page}
PAGES |= {f"images/schedules/{name}.svg": partial(picture, name) for name in WHEN}
