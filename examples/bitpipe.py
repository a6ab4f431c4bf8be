"""BitPipe (arXiv 2410.19367) as a schedule and a placement that schedir has no name for.

    python examples/bitpipe.py
    schedir draw examples/bitpipe.py:two_vees --ranks 4 --microbatches 4 --costs F=1,B=2 \\
        --placement 0,1,2,3,3,2,1,0/3,2,1,0,0,1,2,3 -o bitpipe.svg

There are two pipelines.  One passes down the ranks and back, and the other one up and back.  So
each stage has two replicas, each placed in a vee.  Each pipeline gets half of the microbatches.
"""

import schedir
from schedir import B, F, PipelineShape, RankSchedule
from schedir.schedule_algebra import concat


def two_vees(rank: int, ranks: int, microbatches: int) -> RankSchedule:
    """Each way is 1F1B along 2P stages, a microbatch every other slot; the other way fills up.

    A slot is as long as a forward, or a backward.  P microbatches, half each way, tile 4P slots on
    every rank if P is even; so more of them follow in units of P.
    """
    if ranks % 2:
        raise ValueError(
            f"the two ways fit into each other on an even number of ranks, not {ranks}"
        )
    slots: list[tuple[int, RankSchedule]] = []
    outer = min(rank, ranks - 1 - rank)
    for j, stage in enumerate((outer, ranks - 1 - outer, ranks + outer, 2 * ranks - 1 - outer)):
        down = stage in (rank, 2 * ranks - 1 - rank)
        for k in range((microbatches + down) // 2):  # the odd one goes down
            unit, place = divmod(k, ranks // 2)
            begin = unit * 4 * ranks + place * 2
            slots.append((begin + stage, F[j]))
            slots.append((begin + 4 * ranks - 1 - stage, B[j]))
    return concat(word for _, word in sorted(slots, key=lambda slot: slot[0]))


def plan_for(ranks: int, microbatches: int) -> PipelineShape:
    """The first holders of the stages lie in a vee, and the second ones in its mirror image."""
    there = [*range(ranks)]
    back = there[::-1]
    return PipelineShape(ranks, microbatches, placement=((*there, *back), (*back, *there)))


def main() -> None:
    """Check it, hold it to its bubble, and run it beside a plain loop over the model."""
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
    for what, order in (("in its order", program), ("a plain loop", None)):
        run_sequential(stages, x, y, loss=nn.functional.mse_loss, program=order)
        plain = [p.grad for stage in stages for p in stage.parameters() if p.grad is not None]
        apart = max(float((a - b).norm() / b.norm()) for a, b in zip(got, plain, strict=True))
        print(f"gradients beside the reference's, {what}: {apart:.0e} apart")


if __name__ == "__main__":
    main()
