"""PipeDream-2BW: no flush between updates, with delayed weights."""

from __future__ import annotations

from schedir.schedules.schedule_algebra import RankSchedule, with_weight_delay
from schedir.schedules.single_stage import one_f_one_b


@with_weight_delay(1)
def pipedream_2bw(r: int, P: int, m: int) -> RankSchedule:
    """Run PipeDream-2BW: 1F1B without a flush, with two versions of the weights.

    With `PipelineShape(optimizer_steps=..., weight_delay=1)`, the weights after u+1 updates are
    w(u+1) = w(u) - lr grad(w(u-1)), as in the paper. The first update uses the gradient at w(0).
    Each update needs at least P-1 microbatches.

    PipeDream itself (arXiv 1806.03377) is `one_f_one_b` with an update per microbatch and a weight
    delay of P-1-s for stage s. Rank r then keeps P-r versions of the weights.

    - Idle time of each rank, for any number of updates: (P-1)(F+B).
    - In flight: min(P-r, m) activations on rank r, which also has two versions of the weights.

    Args:
        r: Rank, 0 to P - 1.
        P: Number of ranks.
        m: Number of microbatches.

    Returns:
        The rank schedule of rank `r`.

    References:
        arXiv 2006.09503.

    Example:
        >>> from schedir.schedules import pipedream_2bw
        >>> from schedir import PipelineShape, compile
        >>> shape = PipelineShape(ranks=2, microbatches=6, optimizer_steps=3, weight_delay=1)
        >>> program = compile(pipedream_2bw, shape)
        >>> print(*program.streams[1][:8], sep="; ")
        recv_act 1.0; F 1.0; recv_act 1.1; B 1.0; send_grad 1.0; F 1.1; B 1.1; reduce_grads 1
        >>> print(*program.streams[1][8:16], sep="; ")
        recv_act 1.2; send_grad 1.1; step; F 1.2; B 1.2; recv_act 1.3; send_grad 1.2; F 1.3
    """
    return one_f_one_b(r, P, m)
