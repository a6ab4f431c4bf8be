"""Generate the page of the schedules, with their formulas and pictures."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from inspect import getdoc

from docs import pages
from docs.pages import format_table
from schedir import (
    Costs,
    PipelineShape,
    Timeline,
    compile,
    greedy_schedule,
    schedules,
    simulate,
    viz,
)
from schedir.schedules.schedule_algebra import (
    get_placement_mark,
    get_stages_per_rank,
    get_weight_delay_mark,
)

# When to use each schedule, in the order of the page.
WHEN = {
    "gpipe": "As a baseline, or with few microbatches.",
    "one_f_one_b": "As the default, if memory is short and messages are fast.",
    "eager_1f1b": "If messages are slow and there is memory for twice the warmup.",
    "interleaved": "If the layers can be divided into more stages, links are fast, and backwards "
    "cannot be split.",
    "looped_bfs": "With ZeRO 3, which gathers the weights stage by stage.",
    "looped_dfs": "As a baseline for `interleaved`.",
    "wave": "With m = P, if the first and the last stage must be on one rank. Otherwise "
    "`interleaved` has a smaller bubble.",
    "zb_h1": "Instead of 1F1B, if backwards can be split. At F = I = W, 1F1B has three times as "
    "much idle time. Each rank of ZB-H1 needs the memory of the first rank of 1F1B.",
    "zb_h2": "If there is much memory and ranks need not end together.",
    "interleaved_zb": "Instead of `interleaved`, if backwards can be split.",
    "zb_v": "For the smallest bubble in the memory of 1F1B, if F, I and W are similar.",
    "v_half": "If there is only half of the memory that 1F1B needs.",
    "v_min": "If there is only a third of the memory that 1F1B needs, and F, I and W are similar.",
    "dualpipe_v": "If messages take long, as with expert parallelism. Pairs hide the messages.",
    "pipedream_2bw": "If gradients may be one update late. The pipeline drains only once, after "
    "the last update.",
    "dualpipe": "Instead of `dualpipe_v`, if parameters are small compared with activations. It "
    "needs half as many messages, twice the parameters, and one more reduction.",
    "bitpipe": "Instead of `chimera`, if the layers can be divided into twice as many stages. It "
    "has half of the bubble, and nearly twice the messages.",
    "chimera": "With m = P and full backwards, if there is memory for twice the parameters.",
    "forward_only": "For evaluation and inference.",
}  # fmt: skip


def get_default_placement(name: str) -> tuple[str, int]:
    """Return the placement and the stages per rank with which the page shows a schedule."""
    schedule = getattr(schedules, name)
    return str(get_placement_mark(schedule)[0] or "loop"), get_stages_per_rank(schedule)


def simulate_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    costs: tuple[float, ...] = (1.0, 1.0, 1.0),
    v: int | None = None,
    send: float = 0.0,
) -> Timeline:
    """Simulate a schedule.

    Args:
        name: The schedule's name.
        ranks: The number of ranks.
        microbatches: The number of microbatches.
        costs: F, I and W of all stages of a rank; each stage takes its share.
        v: Stages per rank. The default is the schedule's own number.
        send: The time of a message.
    """
    schedule = getattr(schedules, name)
    placement, default_v = get_default_placement(name)
    delay = get_weight_delay_mark(schedule)
    updates = 1 if delay is None else microbatches // ranks
    shape = PipelineShape(
        ranks,
        microbatches,
        v or default_v,
        placement,
        optimizer_steps=updates,
        weight_delay=delay or 0,
    )
    F, I, W = (c * ranks / shape.stages for c in costs)
    costs_per_stage = Costs(F=F, I=I, W=W, send=send)
    return simulate(
        compile(schedule, shape, progress_model="per_edge", costs=costs_per_stage),
        costs_per_stage,
        progress_model="per_edge",
    )


def compute_figures(name: str, ranks: int, microbatches: int) -> tuple[float, float, float]:
    """Return the peak memory, and the bubble in both measures."""
    timeline = simulate_schedule(name, ranks, microbatches)
    longest = int(timeline.active_span.argmax())
    active_bubble = timeline.idle_in_active_span[longest] / timeline.active_span[longest]
    peak = timeline.peak_in_flight.max() if timeline.program.has_backward else 0
    return (
        float(peak) * ranks / timeline.program.shape.stages,
        timeline.bubble,
        float(active_bubble),
    )


def build_blocks() -> dict[str, str]:
    """Return the tables of all schedules, and a section for each."""
    assert {*WHEN} == {*schedules.__all__}
    sizes = ((4, 8), (8, 32))
    numbers = {name: [compute_figures(name, *size) for size in sizes] for name in WHEN}

    def cells(name: str) -> list[str]:
        return [cell for memory, *idle in numbers[name]
                for cell in (f"{memory:g}", *(f"{share:.1%}" for share in idle))]  # fmt: skip

    trains = [name for name in WHEN if name != "forward_only"]
    by_memory = sorted(trains, key=lambda name: numbers[name][1])
    heads = [
        f"{measure}, {P} x {m}"
        for P, m in sizes
        for measure in ("memory", "bubble", "bubble in active span")
    ]
    rows = [
        [f"[`{n}`](#{n})", *map(str, reversed(get_default_placement(n))), *cells(n)]
        for n in [*by_memory, "forward_only"]
    ]
    costs = ((1, 1, 1), (1, 1.2, 0.8), (1, 1.4, 0.6), (0.8, 1, 1.2), (1.2, 1, 0.8))
    bubbles = {
        name: [f"{simulate_schedule(name, 8, 32, c).bubble:.1%}" for c in costs]
        for name in by_memory
    }
    unequal = [[f"`{name}`", *row] for name, row in bubbles.items() if len({*row}) > 1]
    sections = "\n\n".join(
        f"### {name}\n\n"
        f"{format_description(getattr(schedules, name), when)}\n\n"
        f"![{name} on 4 ranks with 8 microbatches](../images/schedules/{name}.svg)"
        for name, when in WHEN.items()
    )
    costs_of = [f"F, I, W = {', '.join(map(str, c))}" for c in costs]
    return {
        "all": format_table(["schedule", "stages per rank", "placement", *heads], rows),
        "unequal": format_table(["schedule", *costs_of], unequal),
        "each": sections,
        "greedy": format_description(greedy_schedule),
    }


def format_description(function: Callable[..., object], use: str = "") -> str:
    """Return the prose of a docstring and its references, without the other sections.

    Args:
        function: The function.
        use: When to use the schedule.
    """
    text = str(getdoc(function))
    prose = re.split(r"\n\n(?:Args|Returns|Raises|References|Example):\n", text)[0].strip()
    references = re.search(r"^References:\n((?:    .*\n?)+)", text, re.M)
    source = f"\n- Source: {' '.join(references[1].split())}" if references else ""
    when = f"\n- When to use: {use}" if use else ""
    return f"{prose}{when}{source}"


def draw_schedule(name: str) -> None:
    """Draw a schedule at 4 ranks and 8 microbatches."""
    viz.save(viz.gantt(simulate_schedule(name, 4, 8)), f"{name}.svg")


PAGES = pages.define_page("reference/schedules", build_blocks)
PAGES |= {
    f"images/schedules/{name}.svg": partial(
        pages.draw_svg, f"{name}.svg", partial(draw_schedule, name)
    )
    for name in WHEN
}
