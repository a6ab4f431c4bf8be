"""BitPipe (arXiv 2410.19367) as a schedule in your own file, with a list as its placement.

    python examples/bitpipe.py      # prints the bubble, and compares gradients with those of a loop
    schedir draw examples/bitpipe.py:two_vees --ranks 4 --microbatches 4 --costs F=1,B=2 \\
        --placement 0,1,2,3,3,2,1,0/3,2,1,0,0,1,2,3 -o bitpipe.svg

BitPipe has two pipelines. One goes from rank 0 to the last rank and back. The other goes from the
last rank to rank 0 and back. So each stage has two replicas, and each pipeline places its replicas
in a vee. Each pipeline gets half of the microbatches.
"""

import schedir
from schedir import B, F, PipelineShape, RankSchedule
from schedir.schedule_algebra import concat


def two_vees(rank: int, ranks: int, microbatches: int) -> RankSchedule:
    """Return the instructions of a rank: 1F1B over 2P stages in each of two directions.

    P is the number of ranks. The pipeline that starts on rank 0 has the direction *down*.

    A slot is the time of a forward or of a backward. Each direction starts a microbatch in every
    second slot, and the other direction uses the slots between. If P is even, P microbatches, half
    of them in each direction, fill 4P slots on every rank without a gap. So further microbatches
    follow in groups of P.
    """
    if ranks % 2:
        raise ValueError(f"two_vees needs an even number of ranks, not {ranks}")
    slots: list[tuple[int, RankSchedule]] = []
    edge = min(rank, ranks - 1 - rank)  # distance to the nearest end of the pipeline
    stages = (edge, ranks - 1 - edge, ranks + edge, 2 * ranks - 1 - edge)
    for local_stage, stage in enumerate(stages):
        is_down = stage in (rank, 2 * ranks - 1 - rank)
        # If the number of microbatches is odd, the direction down has one more.
        for index in range((microbatches + is_down) // 2):
            group, index_in_group = divmod(index, ranks // 2)
            first_slot = group * 4 * ranks + index_in_group * 2
            slots.append((first_slot + stage, F[local_stage]))
            slots.append((first_slot + 4 * ranks - 1 - stage, B[local_stage]))
    return concat(instruction for _, instruction in sorted(slots, key=lambda slot: slot[0]))


def plan_for(ranks: int, microbatches: int) -> PipelineShape:
    """Return a shape whose first replicas are in a vee, and the second in its mirror image."""
    down = [*range(ranks)]
    up = down[::-1]
    return PipelineShape(ranks, microbatches, placement=((*down, *up), (*up, *down)))


def main() -> None:
    """Check the schedule, print its bubble, and compare gradients with those of a plain loop."""
    import torch
    from torch import nn

    from schedir.runtime import InProcessExecutor, run_sequential

    for ranks in (4, 8):
        program = schedir.compile(two_vees, plan_for(ranks, ranks))
        schedir.check(program, "per_device")
        bubble = schedir.simulate(program, schedir.Costs(F=1, B=2)).bubble
        expected_bubble = (ranks - 2) / (3 * ranks + ranks - 2)
        print(
            f"{ranks} ranks, {ranks} microbatches: bubble {bubble:.4f}, "
            f"(P-2)/(3m+P-2) {expected_bubble:.4f}"
        )

    torch.manual_seed(0)
    program = schedir.compile(two_vees, plan_for(4, 8))
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(program.shape.stages)]
    x, y = torch.randn(2, 8, 4, 16)
    executor = InProcessExecutor(program, stages, loss=nn.functional.mse_loss, boundary=(4, 16))
    executor.step(x, y)
    gradients = [
        p.grad.clone() for stage in stages for p in stage.parameters() if p.grad is not None
    ]
    for description, order in (
        ("in the order of the schedule", program),
        ("in ascending order", None),
    ):
        run_sequential(stages, x, y, loss=nn.functional.mse_loss, program=order)
        loop_gradients = [
            p.grad for stage in stages for p in stage.parameters() if p.grad is not None
        ]
        difference = max(
            float((a - b).norm() / b.norm()) for a, b in zip(gradients, loop_gradients, strict=True)
        )
        print(f"relative difference from gradients of a loop {description}: {difference:.0e}")


if __name__ == "__main__":
    main()
