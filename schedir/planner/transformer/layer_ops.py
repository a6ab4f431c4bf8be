"""List the GEMMs, memory passes and collectives of a layer, an embedding and a head.

Products, kernels that read and write, and collectives, of a transformer as Megatron-LM cuts it
(arXiv 1909.08053, section 3; 2205.05198, section 4).  `layer_time` computes their times.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from schedir.errors import UsageError
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.transformer_spec import TransformerSpec

Group = Literal["tensor", "context", "expert"]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange"]


class Gemm(NamedTuple):
    """`batch` products (m, k) x (k, n) in the forward, and two as large for each in the backward.

    With `weight` the second factor is one: its gradient is a product of its own, which adds to a
    sum in 32 bits.  Otherwise both factors are activations, and their gradients go on backwards.
    `shared` products have one second factor.  What is `core` runs again with selective
    recomputation; `flash` is a part of one kernel that keeps the result on chip.
    """

    what: str
    m: int
    n: int
    k: int
    batch: int = 1
    weight: bool = True
    shared: int = 1
    core: bool = False
    flash: bool = False

    @property
    def flops(self) -> float:
        """Operations of the forward."""
        return 2.0 * self.m * self.n * self.k * self.batch


class MemoryPass(NamedTuple):
    """Kernels that compute next to nothing: bytes that they read and write in the forward, in the
    backward of inputs and of weights, and how many kernels these are.

    A gradient of a weight is a kernel, and adding it to its sum another.
    """

    what: str
    forward: float
    inputs: float
    weights: float = 0.0
    kernels: tuple[int, int, int] = (1, 1, 0)
    core: bool = False


class CollectiveOp(NamedTuple):
    """A sum, a gather or an exchange of `size` bytes, as `Cluster` counts them, over a group.

    `phase` is F or I; in I it may run beside the weight gradient of the product `under`.  An
    exchange runs beside the core of attention.
    """

    what: str
    kind: Kind
    size: float
    group: Group
    phase: Literal["F", "I"]
    under: str = ""


class LayerOps(NamedTuple):
    """What a part of a model is made of."""

    gemms: tuple[Gemm, ...] = ()
    passes: tuple[MemoryPass, ...] = ()
    collectives: tuple[CollectiveOp, ...] = ()

    def and_(self, *others: LayerOps) -> LayerOps:
        """All of several."""
        every = (self, *others)
        return LayerOps(
            sum((x.gemms for x in every), ()),
            sum((x.passes for x in every), ()),
            sum((x.collectives for x in every), ()),
        )


def refuse_uneven(model: TransformerSpec, choice: ParallelPlan) -> None:
    """Raise UsageError where slices, parts of a sequence, or experts do not come out even."""
    t, c, kv = choice.tp, choice.cp, model.kv_heads
    rows = [
        ("heads", model.heads, t, "tp"),
        ("ffn", model.ffn, t, "tp"),
        ("sequence", model.sequence, c * (t if choice.sequence_parallel else 1),
         "cp tp" if choice.sequence_parallel else "cp"),
        ("experts", model.experts, choice.ep, "ep"),
        ("dp", choice.dp, choice.ep, "ep"),
    ]  # fmt: skip
    if kv % t and t % kv:
        rows.append(("kv_heads", kv, t, "tp"))
    for name, size, parts, which in rows:
        if size % parts:
            raise UsageError(
                f"{name} {size} cannot be divided among {which} {parts}", fields=[name, which[0]]
            )


def layer_pieces(model: TransformerSpec, choice: ParallelPlan) -> LayerOps:
    """One layer: attention and a feed-forward network, each behind a norm, beside a residual."""
    refuse_uneven(model, choice)
    return _attention(model, choice).and_(_experts(model, choice))


def tokens(model: TransformerSpec, choice: ParallelPlan) -> int:
    """Of a microbatch, on one GPU, where its slices do not cut the sequence."""
    return choice.microbatch_size * model.sequence // choice.cp


def _wide(model: TransformerSpec, choice: ParallelPlan) -> float:
    """Numbers of an activation as wide as the model, on one GPU, where norms and dropout are."""
    cut = choice.tp if choice.sequence_parallel else 1
    return tokens(model, choice) * model.hidden / cut


def _in_out(
    model: TransformerSpec, choice: ParallelPlan, first: str, last: str
) -> tuple[CollectiveOp, ...]:
    """What stands around products that are cut by columns, then by rows.

    arXiv 1909.08053, section 3: f and g are all-reduces, one in the forward and one in the
    backward; 2205.05198, section 4.2.2: with the sequence cut, each becomes a gather and a
    scattered sum, and the input is gathered once more for its weight's gradient, beside the
    product of the input's.
    """
    if choice.tp == 1:
        return ()
    size = 2.0 * tokens(model, choice) * model.hidden
    if not choice.sequence_parallel:
        return (
            CollectiveOp(f"sum of {last}", "all_reduce", size, "tensor", "F"),
            CollectiveOp(f"sum behind {first}", "all_reduce", size, "tensor", "I", first),
        )
    return (
        CollectiveOp(f"input of {first}", "all_gather", size, "tensor", "F"),
        CollectiveOp(f"sum of {last}", "reduce_scatter", size, "tensor", "F"),
        CollectiveOp(f"gradient of {last}", "all_gather", size, "tensor", "I"),
        CollectiveOp(f"input of {first} again", "all_gather", size, "tensor", "I", first),
        CollectiveOp(f"sum behind {first}", "reduce_scatter", size, "tensor", "I", first),
    )


def _norm(what: str, model: TransformerSpec, choice: ParallelPlan) -> MemoryPass:
    """Reads x and writes y; backwards reads x and dy, writes dx, and adds it to the residual's;
    for gain and shift it reads x and dy once more."""
    wide = _wide(model, choice)
    return MemoryPass(what, 4 * wide, (6 + 6) * wide, 4 * wide, (1, 2, 2))


def _dropout_add(what: str, model: TransformerSpec, choice: ParallelPlan) -> MemoryPass:
    """Adds bias and residual around a dropout: reads two, writes one and a mask of a byte;
    backwards reads the gradient and the mask, writes one, and sums it for the bias."""
    wide = _wide(model, choice)
    return MemoryPass(what, 7 * wide, 5 * wide, 2 * wide, (1, 1, 2))


def _attention(model: TransformerSpec, choice: ParallelPlan) -> LayerOps:
    t, s, flash = choice.tp, model.sequence, choice.attention == "flash"
    rows, width = tokens(model, choice), model.hidden // model.heads
    heads, kv = model.heads // t, max(model.kv_heads // t, 1)
    many, mine = choice.microbatch_size * heads, s // choice.cp
    core = {"weight": False, "shared": heads // kv if heads % kv == 0 else 1, "core": True}
    gemms = (
        Gemm("qkv", rows, (heads + 2 * kv) * width, model.hidden),
        Gemm("scores", mine, s, width, many, flash=flash, **core),  # type: ignore[arg-type]
        Gemm("values", mine, width, s, many, flash=flash, **core),  # type: ignore[arg-type]
        Gemm("projection", rows, model.hidden, heads * width),
    )
    square, own = float(many) * mine * s, float(rows) * heads * width
    on_scores = (
        MemoryPass("softmax", 4 * square, 6 * square, core=True),
        MemoryPass("dropout of weights", 5 * square, 5 * square, core=True),
    )
    passes = (
        _norm("norm before attention", model, choice),
        MemoryPass(
            "heads apart and together",
            4 * own,
            4 * own * (2 + 2 * kv / heads),
            2 * own * (1 + 2 * kv / heads),
            (1, 3, 2),
        ),
        *(() if flash else on_scores),
        _dropout_add("dropout and residual behind attention", model, choice),
    )
    exchange: tuple[CollectiveOp, ...] = ()
    if choice.cp > 1:
        keys = 2 * 2.0 * choice.microbatch_size * s * kv * width  # of keys and values, whole
        exchange = (
            CollectiveOp("keys and values", "exchange", keys, "context", "F"),
            CollectiveOp("keys, values and their gradients", "exchange", 2 * keys, "context", "I"),
        )  # fmt: skip
    return LayerOps(gemms, passes, _in_out(model, choice, "qkv", "projection") + exchange)


def _experts(model: TransformerSpec, choice: ParallelPlan) -> LayerOps:
    """The feed-forward network, or those that a token is sent to, spread over `ep` replicas."""
    rows, ffn = tokens(model, choice), model.ffn // choice.tp
    into = 2 * ffn if model.gated else ffn
    sent = rows * model.active
    batch, each = 1, rows
    routing: tuple[MemoryPass, ...] = ()
    router: tuple[Gemm, ...] = ()
    exchange: tuple[CollectiveOp, ...] = ()
    if model.experts > 1:
        batch = model.experts // choice.ep
        each = -(-sent // batch)  # as many from everywhere as are sent away: an even load
        copies = _wide(model, choice) * model.active
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
        _norm("norm before the network", model, choice),
        *routing,
        gate if model.gated else gelu,
        _dropout_add("dropout and residual behind the network", model, choice),
    )
    return LayerOps(
        gemms,
        passes,
        _in_out(model, choice, "ffn in", "ffn out") + (exchange if choice.ep > 1 else ()),
    )


def embedding_pieces(model: TransformerSpec, choice: ParallelPlan) -> LayerOps:
    """Rows of a matrix that is cut by rows over t, those of positions, and a dropout.

    Before them come tokens, targets and masks: small kernels, which only the host feels.  Kernels
    are Megatron-LM's (get_ltor_masks_and_position_ids, and VocabParallelEmbedding, which masks what
    is on other slices).
    """
    wide, rows = _wide(model, choice), tokens(model, choice)
    whole = float(rows) * model.hidden
    table = model.vocab * model.hidden / choice.tp  # its gradient is made whole, then added
    size = 2 * whole
    masks = 7 if choice.tp > 1 else 0  # of rows that are on other slices
    passes = (
        MemoryPass("tokens, targets and masks", 0, 0, 0, (9, 0, 0)),
        MemoryPass(
            "rows of the embedding", 4 * whole, 0, 4 * whole + 12 * table, (1 + masks, 0, 2)
        ),
        MemoryPass("positions and dropout", (6 + 5) * wide, 5 * wide, 2 * wide, (2, 1, 2)),
    )
    if choice.tp == 1:
        return LayerOps((), passes)
    if choice.sequence_parallel:
        return LayerOps((), passes, (
            CollectiveOp("sum of the embedding", "reduce_scatter", size, "tensor", "F"),
            CollectiveOp("gradient of the embedding", "all_gather", size, "tensor", "I"),
        ))  # fmt: skip
    return LayerOps((), passes, (
        CollectiveOp("sum of the embedding", "all_reduce", size, "tensor", "F"),
    ))  # fmt: skip


def head_pieces(model: TransformerSpec, choice: ParallelPlan) -> LayerOps:
    """The last norm, logits of a vocabulary that is cut over t, and their loss.

    The loss is Megatron-LM's (core/tensor_parallel/cross_entropy.py), a kernel for each of its
    lines.  Of all logits: to 32 bits, the largest, what is less by it, the exponential, its sum,
    its share; backwards a product with the loss's gradient, and to 16 bits.  The others are of a
    number for each token, and so are three sums that go around.
    """
    rows, vocab = tokens(model, choice), -(-model.vocab // choice.tp)
    logits = float(rows) * vocab
    size, each = 2.0 * rows * model.hidden, 4.0 * rows
    passes = (
        _norm("last norm", model, choice),
        MemoryPass("loss", (6 + 4 + 8 + 8 + 4 + 8) * logits, (8 + 6) * logits, 0, (27, 13, 0)),
    )
    collectives: tuple[CollectiveOp, ...] = ()
    if choice.tp > 1:
        cut = choice.sequence_parallel
        kind: Kind = "reduce_scatter" if cut else "all_reduce"
        collectives = (
            *([CollectiveOp("input of logits", "all_gather", size, "tensor", "F")] if cut else []),
            CollectiveOp("sum behind logits", kind, size, "tensor", "I", "logits"),
            *[CollectiveOp(f"{of} of the loss", "all_reduce", each, "tensor", "F")
              for of in ("largest", "targets", "sum")],
        )  # fmt: skip
    return LayerOps((Gemm("logits", rows, vocab, model.hidden),), passes, collectives)
