"""BitPipe (arXiv 2410.19367) as a schedule of your own, with a placement given as a list.

    python examples/bitpipe.py
    schedir draw examples/bitpipe.py:two_vees --ranks 4 --microbatches 4 --costs F=1,B=2 \\
        --placement 0,1,2,3,3,2,1,0/3,2,1,0,0,1,2,3 -o bitpipe.svg

There are two pipelines. One goes from rank 0 to the last rank and back. The other goes from the
last rank to rank 0 and back. So each stage has two replicas, and the replicas of each pipeline are
placed in a vee. Each pipeline gets half of the microbatches.
"""

import schedir
from schedir import B, F, PipelineShape, RankSchedule
from schedir.schedule_algebra import concat


def two_vees(rank: int, ranks: int, microbatches: int) -> RankSchedule:
    """Return the order of a rank: 1F1B over 2P stages in each of two directions.

    A slot is the time of a forward or of a backward. Each direction starts a microbatch in every
    second slot, and the other direction uses the slots between. If P is even, P microbatches, half
    of them in each direction, fill 4P slots on every rank without a gap. So further microbatches
    follow in groups of P.
    """
    if ranks % 2:
        raise ValueError(
            f"the two ways fit into each other on an even number of ranks, not {ranks}"
        )
    slots: list[tuple[int, RankSchedule]] = []
    outer = min(rank, ranks - 1 - rank)
    for j, stage in enumerate((outer, ranks - 1 - outer, ranks + outer, 2 * ranks - 1 - outer)):
        down = stage in (rank, 2 * ranks - 1 - rank)
        for k in range((microbatches + down) // 2):  # an odd microbatch goes down
            unit, place = divmod(k, ranks // 2)
            begin = unit * 4 * ranks + place * 2
            slots.append((begin + stage, F[j]))
            slots.append((begin + 4 * ranks - 1 - stage, B[j]))
    return concat(word for _, word in sorted(slots, key=lambda slot: slot[0]))


def plan_for(ranks: int, microbatches: int) -> PipelineShape:
    """Return a shape with the first replicas in a vee, and the second ones in its mirror image."""
    there = [*range(ranks)]
    back = there[::-1]
    return PipelineShape(ranks, microbatches, placement=((*there, *back), (*back, *there)))


def main() -> None:
    """Check the schedule and its bubble, and compare a run with a plain loop over the model."""
    import torch
    from torch import nn

    from schedir.runtime import InProcessExecutor, run_sequential

    for ranks in (4, 8):
        program = schedir.compile(two_vees, plan_for(ranks, ranks))
        schedir.check(program, "per_device")
        bubble = schedir.simulate(program, schedir.Costs(F=1, B=2)).bubble
        law = (ranks - 2) / (3 * ranks + ranks - 2)
        print(f"{ranks} ranks, {ranks} microbatches: bubble {bubble:.4f}, (P-2)/(3m+P-2) {law:.4f}")

    torch.manual_seed(0)
    program = schedir.compile(two_vees, plan_for(4, 8))
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(program.shape.stages)]
    x, y = torch.randn(2, 8, 4, 16)
    virtual = InProcessExecutor(program, stages, loss=nn.functional.mse_loss, boundary=(4, 16))
    virtual.step(x, y)
    got = [p.grad.clone() for stage in stages for p in stage.parameters() if p.grad is not None]
    for what, order in (("in the order of the schedule", program), ("in ascending order", None)):
        run_sequential(stages, x, y, loss=nn.functional.mse_loss, program=order)
        plain = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
        apart = max(float((a - b).norm() / b.norm()) for a, b in zip(got, plain, strict=True))
        print(f"relative difference from gradients of a loop {what}: {apart:.0e}")


if __name__ == "__main__":
    main()
