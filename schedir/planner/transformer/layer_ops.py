"""List the GEMMs, memory passes and collectives of a layer, an embedding and a head.

Products, kernels that read and write, and collectives, of a transformer as Megatron-LM cuts it
(arXiv 1909.08053, section 3; 2205.05198, section 4).  `layer_time` computes their times.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from schedir.errors import UsageError
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.transformer_spec import TransformerSpec

GroupKind = Literal["tensor", "context", "expert"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange"]


class Gemm(NamedTuple):
    """`batch` products (m, k) x (k, n) in the forward, and two as large for each in the backward.

    With `has_weight` the second factor is one: its gradient is a product of its own, which adds to
    a sum in 32 bits.  Otherwise both factors are activations, and their gradients go on backwards.
    `second_factor_uses` products have one second factor.  What is `is_attention_core` runs again
    with selective recomputation; `is_flash` is a part of one kernel that keeps the result on chip.
    """

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    has_weight: bool = True
    second_factor_uses: int = 1
    is_attention_core: bool = False
    is_flash: bool = False

    @property
    def forward_flops(self) -> float:
        """Operations of the forward."""
        return 2.0 * self.m * self.n * self.k * self.batch


class MemoryPass(NamedTuple):
    """Kernels that compute next to nothing: bytes that they read and write in the forward, in the
    backward of inputs and of weights, and how many kernels these are.

    A gradient of a weight is a kernel, and adding it to its sum another.
    """

    name: str
    forward_bytes: float
    input_grad_bytes: float
    weight_grad_bytes: float = 0.0
    kernel_counts: tuple[int, int, int] = (1, 1, 0)
    is_attention_core: bool = False


class CollectiveOp(NamedTuple):
    """A sum, a gather or an exchange of `size` bytes, as `Cluster` counts them, over a group.

    `phase` is F or I; in I it may run beside the weight gradient of the product `overlapped_gemm`.
    An exchange runs beside the core of attention.
    """

    name: str
    kind: CollectiveKind
    size: float
    group: GroupKind
    phase: Literal["F", "I"]
    overlapped_gemm: str = ""


class LayerOps(NamedTuple):
    """What a part of a model is made of."""

    gemms: tuple[Gemm, ...] = ()
    passes: tuple[MemoryPass, ...] = ()
    collectives: tuple[CollectiveOp, ...] = ()

    def plus(self, *others: LayerOps) -> LayerOps:
        """All of several."""
        every = (self, *others)
        return LayerOps(
            sum((x.gemms for x in every), ()),
            sum((x.passes for x in every), ()),
            sum((x.collectives for x in every), ()),
        )


def require_even_division(model: TransformerSpec, plan: ParallelPlan) -> None:
    """Raise UsageError where slices, parts of a sequence, or experts do not come out even."""
    t, c, kv = plan.tp, plan.cp, model.kv_heads
    rows = [
        ("heads", model.heads, t, "tp"),
        ("ffn", model.ffn, t, "tp"),
        ("sequence", model.sequence, c * (t if plan.sequence_parallel else 1),
         "cp tp" if plan.sequence_parallel else "cp"),
        ("experts", model.experts, plan.ep, "ep"),
        ("dp", plan.dp, plan.ep, "ep"),
    ]  # fmt: skip
    if kv % t and t % kv:
        rows.append(("kv_heads", kv, t, "tp"))
    for name, size, parts, which in rows:
        if size % parts:
            raise UsageError(
                f"{name} {size} cannot be divided among {which} {parts}", fields=[name, which[0]]
            )


def list_layer_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    """One layer: attention and a feed-forward network, each behind a norm, beside a residual."""
    require_even_division(model, plan)
    return _list_attention_ops(model, plan).plus(_list_ffn_ops(model, plan))


def count_local_tokens(model: TransformerSpec, plan: ParallelPlan) -> int:
    """Of a microbatch, on one GPU, where its slices do not cut the sequence."""
    return plan.microbatch_size * model.sequence // plan.cp


def _count_activations(model: TransformerSpec, plan: ParallelPlan) -> float:
    """Numbers of an activation as wide as the model, on one GPU, where norms and dropout are."""
    cut = plan.tp if plan.sequence_parallel else 1
    return count_local_tokens(model, plan) * model.hidden / cut


def _list_tp_collectives(
    model: TransformerSpec, plan: ParallelPlan, first_gemm: str, last_gemm: str
) -> tuple[CollectiveOp, ...]:
    """What stands around products that are cut by columns, then by rows.

    arXiv 1909.08053, section 3: f and g are all-reduces, one in the forward and one in the
    backward; 2205.05198, section 4.2.2: with the sequence cut, each becomes a gather and a
    scattered sum, and the input is gathered once more for its weight's gradient, beside the
    product of the input's.
    """
    if plan.tp == 1:
        return ()
    size = 2.0 * count_local_tokens(model, plan) * model.hidden
    if not plan.sequence_parallel:
        return (
            CollectiveOp(f"sum of {last_gemm}", "all_reduce", size, "tensor", "F"),
            CollectiveOp(f"sum behind {first_gemm}", "all_reduce", size, "tensor", "I", first_gemm),
        )
    return (
        CollectiveOp(f"input of {first_gemm}", "all_gather", size, "tensor", "F"),
        CollectiveOp(f"sum of {last_gemm}", "reduce_scatter", size, "tensor", "F"),
        CollectiveOp(f"gradient of {last_gemm}", "all_gather", size, "tensor", "I"),
        CollectiveOp(f"input of {first_gemm} again", "all_gather", size, "tensor", "I", first_gemm),
        CollectiveOp(f"sum behind {first_gemm}", "reduce_scatter", size, "tensor", "I", first_gemm),
    )


def _make_norm_pass(name: str, model: TransformerSpec, plan: ParallelPlan) -> MemoryPass:
    """Reads x and writes y; backwards reads x and dy, writes dx, and adds it to the residual's;
    for gain and shift it reads x and dy once more."""
    wide = _count_activations(model, plan)
    return MemoryPass(name, 4 * wide, (6 + 6) * wide, 4 * wide, (1, 2, 2))


def _make_dropout_pass(name: str, model: TransformerSpec, plan: ParallelPlan) -> MemoryPass:
    """Adds bias and residual around a dropout: reads two, writes one and a mask of a byte;
    backwards reads the gradient and the mask, writes one, and sums it for the bias."""
    wide = _count_activations(model, plan)
    return MemoryPass(name, 7 * wide, 5 * wide, 2 * wide, (1, 1, 2))


def _list_attention_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    t, s, flash = plan.tp, model.sequence, plan.attention == "flash"
    rows, width = count_local_tokens(model, plan), model.hidden // model.heads
    heads, kv = model.heads // t, max(model.kv_heads // t, 1)
    many, mine = plan.microbatch_size * heads, s // plan.cp
    core = {
        "has_weight": False,
        "second_factor_uses": heads // kv if heads % kv == 0 else 1,
        "is_attention_core": True,
    }
    gemms = (
        Gemm("qkv", rows, (heads + 2 * kv) * width, model.hidden),
        Gemm("scores", mine, s, width, many, is_flash=flash, **core),  # type: ignore[arg-type]
        Gemm("values", mine, width, s, many, is_flash=flash, **core),  # type: ignore[arg-type]
        Gemm("projection", rows, model.hidden, heads * width),
    )
    square, own = float(many) * mine * s, float(rows) * heads * width
    on_scores = (
        MemoryPass("softmax", 4 * square, 6 * square, is_attention_core=True),
        MemoryPass("dropout of weights", 5 * square, 5 * square, is_attention_core=True),
    )
    passes = (
        _make_norm_pass("norm before attention", model, plan),
        MemoryPass(
            "heads apart and together",
            4 * own,
            4 * own * (2 + 2 * kv / heads),
            2 * own * (1 + 2 * kv / heads),
            (1, 3, 2),
        ),
        *(() if flash else on_scores),
        _make_dropout_pass("dropout and residual behind attention", model, plan),
    )
    exchange: tuple[CollectiveOp, ...] = ()
    if plan.cp > 1:
        keys = 2 * 2.0 * plan.microbatch_size * s * kv * width  # of keys and values, whole
        exchange = (
            CollectiveOp("keys and values", "exchange", keys, "context", "F"),
            CollectiveOp("keys, values and their gradients", "exchange", 2 * keys, "context", "I"),
        )  # fmt: skip
    return LayerOps(
        gemms, passes, _list_tp_collectives(model, plan, "qkv", "projection") + exchange
    )


def _list_ffn_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    """The feed-forward network, or those that a token is sent to, spread over `ep` replicas."""
    rows, ffn = count_local_tokens(model, plan), model.ffn // plan.tp
    into = 2 * ffn if model.gated else ffn
    sent = rows * model.active
    batch, each = 1, rows
    routing: tuple[MemoryPass, ...] = ()
    router: tuple[Gemm, ...] = ()
    exchange: tuple[CollectiveOp, ...] = ()
    if model.experts > 1:
        batch = model.experts // plan.ep
        each = -(-sent // batch)  # as many from everywhere as are sent away: an even load
        copies = _count_activations(model, plan) * model.active
        router = (Gemm("router", rows, model.experts, model.hidden),)
        routing = (MemoryPass("to experts and back", 8 * copies, 8 * copies, 0, (2, 2, 0)),)
        exchange = tuple(
            CollectiveOp(what, "all_to_all", 2 * copies, "expert", phase)
            for phase in ("F", "I") for what in ("to experts", "back from experts")
        )  # fmt: skip
    gemms = (
        *router,
        Gemm("ffn in", each, into, model.hidden, batch),
        Gemm("ffn out", each, model.hidden, ffn, batch),
    )
    inner = float(batch) * each * ffn
    gate = MemoryPass("gate", 6 * inner, 10 * inner)
    gelu = MemoryPass("bias and GELU", 4 * inner, 6 * inner, 2 * inner, (1, 1, 2))
    passes = (
        _make_norm_pass("norm before the network", model, plan),
        *routing,
        gate if model.gated else gelu,
        _make_dropout_pass("dropout and residual behind the network", model, plan),
    )
    return LayerOps(
        gemms,
        passes,
        _list_tp_collectives(model, plan, "ffn in", "ffn out") + (exchange if plan.ep > 1 else ()),
    )


def list_embedding_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    """Rows of a matrix that is cut by rows over t, those of positions, and a dropout.

    Before them come tokens, targets and masks: small kernels, which only the host feels.  Kernels
    are Megatron-LM's (get_ltor_masks_and_position_ids, and VocabParallelEmbedding, which masks what
    is on other slices).
    """
    wide, rows = _count_activations(model, plan), count_local_tokens(model, plan)
    whole = float(rows) * model.hidden
    table = model.vocab * model.hidden / plan.tp  # its gradient is made whole, then added
    size = 2 * whole
    masks = 7 if plan.tp > 1 else 0  # of rows that are on other slices
    passes = (
        MemoryPass("tokens, targets and masks", 0, 0, 0, (9, 0, 0)),
        MemoryPass(
            "rows of the embedding", 4 * whole, 0, 4 * whole + 12 * table, (1 + masks, 0, 2)
        ),
        MemoryPass("positions and dropout", (6 + 5) * wide, 5 * wide, 2 * wide, (2, 1, 2)),
    )
    if plan.tp == 1:
        return LayerOps((), passes)
    if plan.sequence_parallel:
        return LayerOps((), passes, (
            CollectiveOp("sum of the embedding", "reduce_scatter", size, "tensor", "F"),
            CollectiveOp("gradient of the embedding", "all_gather", size, "tensor", "I"),
        ))  # fmt: skip
    return LayerOps((), passes, (
        CollectiveOp("sum of the embedding", "all_reduce", size, "tensor", "F"),
    ))  # fmt: skip


def list_head_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    """The last norm, logits of a vocabulary that is cut over t, and their loss.

    The loss is Megatron-LM's (core/tensor_parallel/cross_entropy.py), a kernel for each of its
    lines.  Of all logits: to 32 bits, the largest, what is less by it, the exponential, its sum,
    its share; backwards a product with the loss's gradient, and to 16 bits.  The others are of a
    number for each token, and so are three sums that go around.
    """
    rows, vocab = count_local_tokens(model, plan), -(-model.vocab // plan.tp)
    logits = float(rows) * vocab
    size, each = 2.0 * rows * model.hidden, 4.0 * rows
    passes = (
        _make_norm_pass("last norm", model, plan),
        MemoryPass("loss", (6 + 4 + 8 + 8 + 4 + 8) * logits, (8 + 6) * logits, 0, (27, 13, 0)),
    )
    collectives: tuple[CollectiveOp, ...] = ()
    if plan.tp > 1:
        cut = plan.sequence_parallel
        kind: CollectiveKind = "reduce_scatter" if cut else "all_reduce"
        collectives = (
            *([CollectiveOp("input of logits", "all_gather", size, "tensor", "F")] if cut else []),
            CollectiveOp("sum behind logits", kind, size, "tensor", "I", "logits"),
            *[CollectiveOp(f"{of} of the loss", "all_reduce", each, "tensor", "F")
              for of in ("largest", "targets", "sum")],
        )  # fmt: skip
    return LayerOps((Gemm("logits", rows, vocab, model.hidden),), passes, collectives)
