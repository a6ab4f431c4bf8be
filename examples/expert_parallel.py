"""Overlap the all-to-alls of experts with the compute of another microbatch.

    schedir draw examples/expert_parallel.py:combined_1f1b --ranks 4 --microbatches 8 \\
        -O dp=2 -O ep=2 -O stage_segments=dc \\
        --costs F=1,B=2,dispatch=0.7,combine=0.7 -o combined.svg
    python examples/expert_parallel.py      # compares five schedules

A stage of a mixture-of-experts model has three segments: the layers before the experts (attention
and routing), the experts, and the layers after them. Between two segments there is an all-to-all,
both in forwards (dispatch, combine) and in backwards. While it runs, the rank can compute a segment
of another microbatch. Megatron-LM does this with `--overlap-moe-expert-parallel-comm`. DeepSeek's
DualPipe does it in each pair of a forward and a backward.
"""

from typing import Any

import schedir
from schedir import B, F, RankSchedule, overlapped_pair
from schedir.predict.bubble_causes import IdleCause, idleness

SHAPE: dict[str, Any] = {"ranks": 4, "microbatches": 16}
EXPERTS: dict[str, Any] = {"dp": 2, "ep": 2, "stage_segments": "dc"}
# The times of a segment and of its all-to-alls, in units of a forward. A stage of dualpipe_v has
# half of the layers, so its times are half as long.
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1, "dispatch": 0.7, "combine": 0.7}
COSTS = schedir.Costs(send=0.1, **TIMES)
COSTS_OF_HALF_STAGES = schedir.Costs(send=0.1, **{name: t / 2 for name, t in TIMES.items()})


def combined_1f1b(rank: int, ranks: int, microbatches: int) -> RankSchedule:
    """Overlap each forward of 1F1B with a backward of another microbatch.

    With `stage_segments`, the segments of the forward and of the backward alternate. So a forward
    takes as long as the pair. To fill this time, the warmup is twice as long as that of 1F1B, as in
    `eager_1f1b`.
    """
    warmup = min(2 * (ranks - 1 - rank) + 1, microbatches)
    return warmup * F + (microbatches - warmup) * overlapped_pair(F, B) + warmup * B


def main() -> None:
    """Compare schedules that wait for the all-to-alls with schedules that overlap them."""
    eager_1f1b = schedir.schedules.eager_1f1b
    fill_options = {"fill_collective_waits": "all", "costs": COSTS}
    print(f"{'schedule':26}  span  bubble  exposed all-to-alls")
    cases: list[tuple[str, Any, dict[str, Any], schedir.Costs]] = [
        ("one_f_one_b", schedir.schedules.one_f_one_b, {}, COSTS),
        ("eager_1f1b", eager_1f1b, {}, COSTS),
        ("eager_1f1b, waits filled", eager_1f1b, fill_options, COSTS),
        ("combined_1f1b", combined_1f1b, {}, COSTS),
        ("dualpipe_v", schedir.schedules.dualpipe_v, {}, COSTS_OF_HALF_STAGES),
    ]
    for name, schedule, options, costs in cases:
        program = schedir.compile(schedule, **SHAPE, **EXPERTS, **options)
        timeline = schedir.simulate(program, costs)
        idle = idleness(timeline)
        exposed = idle[idle["cause"] == IdleCause.ALL_TO_ALL]
        rank_time = timeline.span * program.shape.ranks
        exposed_share = (exposed["end"] - exposed["start"]).sum() / rank_time
        print(f"{name:26} {timeline.span:5.1f}  {timeline.bubble:6.1%}  {exposed_share:6.1%}")


if __name__ == "__main__":
    main()
