"""List the GEMMs, memory passes and collectives of a layer, an embedding and a head.

The layers are divided among tensor-parallel ranks as in Megatron-LM (arXiv 1909.08053, section 3;
2205.05198, section 4). `layer_time` computes their times.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from schedir.errors import UsageError
from schedir.planner.parallel_plan import ParallelPlan
from schedir.planner.transformer.transformer_spec import TransformerSpec

GroupKind = Literal["tensor", "context", "expert"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange"]


class Gemm(NamedTuple):
    """A batch of matrix products (m, k) x (k, n) in the forward, and two batches in the backward.

    Attributes:
        name: The name of the product.
        m: The number of rows of the first factor.
        n: The number of columns of the second factor.
        k: The inner dimension.
        batch: The number of products.
        has_weight: True if the second factor is a weight. The product for the weight gradient is
            then part of W, and accumulates in 32 bits. False if both factors are activations. The
            products for both gradients are then part of I.
        second_factor_uses: The number of products that use the same second factor.
        is_attention_core: True if selective recomputation runs the product again.
        is_flash: True if the product is part of a flash attention kernel, which keeps the result on
            chip.
        may_use_low_precision: True if training in FP8 or FP4 uses this precision for the product
            and its gradients. Routers and logits stay in 16 bits.
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
    may_use_low_precision: bool = False

    @property
    def forward_flops(self) -> float:
        """The number of floating-point operations of the forward."""
        return 2.0 * self.m * self.n * self.k * self.batch


class MemoryPass(NamedTuple):
    """Kernels whose time depends only on the bytes that they read and write.

    All bytes are for tensors with 16-bit elements.

    Attributes:
        name: The name of the pass.
        forward_bytes: Bytes of the forward.
        input_grad_bytes: Bytes of the backward of the inputs.
        weight_grad_bytes: Bytes of the backward of the weights.
        kernel_counts: The numbers of kernels in F, I and W. One kernel computes the gradient of a
            weight, and another kernel adds it to the gradient buffer.
        is_attention_core: True if selective recomputation runs the pass again.
    """

    name: str
    forward_bytes: float
    input_grad_bytes: float
    weight_grad_bytes: float = 0.0
    kernel_counts: tuple[int, int, int] = (1, 1, 0)
    is_attention_core: bool = False


class CollectiveOp(NamedTuple):
    """A collective over a group of ranks.

    Attributes:
        name: The name of the collective.
        kind: The type of the collective. "exchange" is the exchange of keys and values among
            context-parallel ranks. This exchange overlaps with the core of attention.
        size: The bytes of the tensor with 16-bit elements. It is the argument `size` of methods
            such as `Cluster.all_reduce_time`.
        group: The type of the group.
        phase: The phase that contains the collective: the forward or the backward of the inputs.
        overlapped_gemm: The name of the product whose weight gradient the collective may overlap
            with, or "" if the collective overlaps with no product.
    """

    name: str
    kind: CollectiveKind
    size: float
    group: GroupKind
    phase: Literal["F", "I"]
    overlapped_gemm: str = ""


class LayerOps(NamedTuple):
    """The operations of a layer, an embedding or a head.

    Attributes:
        gemms: The matrix products.
        passes: The memory passes.
        collectives: The collectives.
    """

    gemms: tuple[Gemm, ...] = ()
    passes: tuple[MemoryPass, ...] = ()
    collectives: tuple[CollectiveOp, ...] = ()

    def plus(self, *others: LayerOps) -> LayerOps:
        """Return the operations of this object and of the others.

        Args:
            *others: Objects with the operations to add.
        """
        all_ops = (self, *others)
        return LayerOps(
            sum((x.gemms for x in all_ops), ()),
            sum((x.passes for x in all_ops), ()),
            sum((x.collectives for x in all_ops), ()),
        )


def require_even_division(model: TransformerSpec, plan: ParallelPlan) -> None:
    """Raise an error if the parallel degrees do not divide the model evenly.

    Args:
        model: The model.
        plan: The plan. Its tp, cp and ep are checked.

    Raises:
        UsageError: A degree does not divide a size. The message names the degree and the size. Or
            the planner does not support the model (`TransformerSpec.require_supported`).
    """
    model.require_supported()
    t, c, kv = plan.tp, plan.cp, model.kv_heads
    rows = [
        ("heads", model.heads, t, "tp"),
        ("ffn", model.ffn, t, "tp"),
        ("sequence", model.sequence, c * (t if plan.sequence_parallel else 1),
         "cp x tp" if plan.sequence_parallel else "cp"),
        ("experts", model.experts, plan.ep, "ep"),
        ("dp", plan.dp, plan.ep, "ep"),
    ]  # fmt: skip
    if kv % t and t % kv:
        rows.append(("kv_heads", kv, t, "tp"))
    for name, size, parts, part_names in rows:
        if size % parts:
            raise UsageError(
                f"{part_names} {parts} does not divide {name} {size}",
                fields=[name, *part_names.split(" x ")],
            )


def list_layer_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    """Return the operations of a layer: attention and a feed-forward network.

    Each of these two parts has a norm before it, and a residual connection around it.

    Args:
        model: The model.
        plan: The plan.

    Raises:
        UsageError: See `require_even_division`.
    """
    require_even_division(model, plan)
    return _list_attention_ops(model, plan).plus(_list_ffn_ops(model, plan))


def count_local_tokens(model: TransformerSpec, plan: ParallelPlan) -> int:
    """Return the number of tokens of a microbatch on one GPU, without sequence parallelism.

    Args:
        model: The model.
        plan: The plan.
    """
    return plan.microbatch_size * model.sequence // plan.cp


def _count_activations(model: TransformerSpec, plan: ParallelPlan) -> float:
    """Return the number of elements of an activation on one GPU, after sequence parallelism."""
    cut = plan.tp if plan.sequence_parallel else 1
    return count_local_tokens(model, plan) * model.hidden / cut


def _list_tp_collectives(
    model: TransformerSpec, plan: ParallelPlan, first_gemm: str, last_gemm: str
) -> tuple[CollectiveOp, ...]:
    """Return the collectives around a column-parallel and a row-parallel product.

    Without sequence parallelism there are two all-reduces, g in the forward and f in the backward
    (arXiv 1909.08053, section 3). With sequence parallelism, an all-gather and a reduce-scatter
    replace each all-reduce (2205.05198, section 4.2.2). The backward then gathers the input once
    more for the weight gradient, in parallel with the product for the input gradient.
    """
    if plan.tp == 1:
        return ()
    size = 2.0 * count_local_tokens(model, plan) * model.hidden
    if not plan.sequence_parallel:
        return (
            CollectiveOp(f"sum of {last_gemm}", "all_reduce", size, "tensor", "F"),
            CollectiveOp(f"sum after {first_gemm}", "all_reduce", size, "tensor", "I", first_gemm),
        )
    return (
        CollectiveOp(f"input of {first_gemm}", "all_gather", size, "tensor", "F"),
        CollectiveOp(f"sum of {last_gemm}", "reduce_scatter", size, "tensor", "F"),
        CollectiveOp(f"gradient of {last_gemm}", "all_gather", size, "tensor", "I"),
        CollectiveOp(f"input of {first_gemm} again", "all_gather", size, "tensor", "I", first_gemm),
        CollectiveOp(f"sum after {first_gemm}", "reduce_scatter", size, "tensor", "I", first_gemm),
    )


def _make_norm_pass(name: str, model: TransformerSpec, plan: ParallelPlan) -> MemoryPass:
    """Return the memory pass of a norm.

    The forward reads x and writes y. I reads x and dy, writes dx, and adds dx to the gradient of
    the residual. W reads x and dy again for the gradients of gain and shift.
    """
    elements = _count_activations(model, plan)
    return MemoryPass(name, 4 * elements, (6 + 6) * elements, 4 * elements, (1, 2, 2))


def _make_dropout_pass(name: str, model: TransformerSpec, plan: ParallelPlan) -> MemoryPass:
    """Return the memory pass of a dropout with bias and residual.

    The forward reads two tensors, and writes one tensor and a mask with a byte per element. I reads
    the gradient and the mask, and writes one tensor. W sums this tensor for the gradient of the
    bias.
    """
    elements = _count_activations(model, plan)
    return MemoryPass(name, 7 * elements, 5 * elements, 2 * elements, (1, 1, 2))


def _list_attention_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    t, s, flash = plan.tp, model.sequence, plan.attention == "flash"
    rows, width = count_local_tokens(model, plan), model.head_dim
    heads = model.heads // t
    kv = max(model.kv_heads // t, 1)
    products, query_rows = plan.microbatch_size * heads, s // plan.cp
    core = {
        "has_weight": False,
        "second_factor_uses": heads // kv if heads % kv == 0 else 1,
        "is_attention_core": True,
    }
    gemms = (
        Gemm("qkv", rows, (heads + 2 * kv) * width, model.hidden, may_use_low_precision=True),
        Gemm("scores", query_rows, s, width, products, is_flash=flash, **core),  # type: ignore[arg-type]
        Gemm("values", query_rows, width, s, products, is_flash=flash, **core),  # type: ignore[arg-type]
        Gemm("projection", rows, model.hidden, heads * width, may_use_low_precision=True),
    )
    scores = float(products) * query_rows * s
    head_elements = float(rows) * heads * width
    on_scores = (
        MemoryPass("softmax", 4 * scores, 6 * scores, is_attention_core=True),
        MemoryPass("dropout of weights", 5 * scores, 5 * scores, is_attention_core=True),
    )
    passes = (
        _make_norm_pass("norm before attention", model, plan),
        MemoryPass(
            "split and merge of heads",
            4 * head_elements,
            4 * head_elements * (2 + 2 * kv / heads),
            2 * head_elements * (1 + 2 * kv / heads),
            (1, 3, 2),
        ),
        *(() if flash else on_scores),
        _make_dropout_pass("dropout and residual after attention", model, plan),
    )
    exchange: tuple[CollectiveOp, ...] = ()
    if plan.cp > 1:
        # Bytes of the keys and values of the full sequence, with 16-bit elements.
        keys = 2 * 2.0 * plan.microbatch_size * s * kv * width
        exchange = (
            CollectiveOp("keys and values", "exchange", keys, "context", "F"),
            CollectiveOp("keys, values and their gradients", "exchange", 2 * keys, "context", "I"),
        )  # fmt: skip
    return LayerOps(
        gemms, passes, _list_tp_collectives(model, plan, "qkv", "projection") + exchange
    )


def _list_ffn_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    """Return the operations of the feed-forward network or of its experts on one GPU."""
    rows = count_local_tokens(model, plan)
    ffn = model.ffn // plan.tp
    into = 2 * ffn if model.gated else ffn
    sent_tokens = rows * model.active
    batch, tokens_per_expert = 1, rows
    routing: tuple[MemoryPass, ...] = ()
    router: tuple[Gemm, ...] = ()
    exchange: tuple[CollectiveOp, ...] = ()
    if model.experts > 1:
        batch = model.experts // plan.ep
        # Assume even load: a GPU receives as many tokens as it sends.
        tokens_per_expert = -(-sent_tokens // batch)
        copies = _count_activations(model, plan) * model.active
        router = (Gemm("router", rows, model.experts, model.hidden),)
        routing = (MemoryPass("to experts and back", 8 * copies, 8 * copies, 0, (2, 2, 0)),)
        exchange = tuple(
            CollectiveOp(direction, "all_to_all", 2 * copies, "expert", phase)
            for phase in ("F", "I") for direction in ("to experts", "back from experts")
        )  # fmt: skip
    gemms = (
        *router,
        Gemm("ffn in", tokens_per_expert, into, model.hidden, batch, may_use_low_precision=True),
        Gemm("ffn out", tokens_per_expert, model.hidden, ffn, batch, may_use_low_precision=True),
    )
    inner = float(batch) * tokens_per_expert * ffn
    gate = MemoryPass("gate", 6 * inner, 10 * inner)
    gelu = MemoryPass("bias and GELU", 4 * inner, 6 * inner, 2 * inner, (1, 1, 2))
    passes = (
        _make_norm_pass("norm before the network", model, plan),
        *routing,
        gate if model.gated else gelu,
        _make_dropout_pass("dropout and residual after the network", model, plan),
    )
    return LayerOps(
        gemms,
        passes,
        _list_tp_collectives(model, plan, "ffn in", "ffn out") + (exchange if plan.ep > 1 else ()),
    )


def list_embedding_ops(model: TransformerSpec, plan: ParallelPlan) -> LayerOps:
    """Return the operations of the embedding: token and position embeddings, and a dropout.

    Each tensor-parallel rank has a part of the rows of the token embedding. The kernels are the
    same as in Megatron-LM: `get_ltor_masks_and_position_ids`, whose small kernels cost only host
    time, and `VocabParallelEmbedding`, which masks the rows of other ranks.

    Args:
        model: The model.
        plan: The plan.
    """
    elements = _count_activations(model, plan)
    rows = count_local_tokens(model, plan)
    full_elements = float(rows) * model.hidden
    # The gradient of the token table is a dense tensor. A kernel adds it to the gradient buffer.
    table = model.vocab * model.hidden / plan.tp
    size = 2 * full_elements
    masks = 7 if plan.tp > 1 else 0  # Kernels that mask the rows of other ranks.
    passes = (
        MemoryPass("tokens, targets and masks", 0, 0, 0, (9, 0, 0)),
        MemoryPass(
            "rows of the embedding",
            4 * full_elements,
            0,
            4 * full_elements + 12 * table,
            (1 + masks, 0, 2),
        ),
        MemoryPass(
            "positions and dropout", (6 + 5) * elements, 5 * elements, 2 * elements, (2, 1, 2)
        ),
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
    """Return the operations of the head: norm, vocabulary-parallel logits and loss.

    The loss is the same as in Megatron-LM (core/tensor_parallel/cross_entropy.py). Each line of
    this code starts a kernel. In the forward, these kernels read or write all logits: the
    conversion to 32 bits, the maximum, its subtraction, the exponential, the sum and the division.
    In the backward, the product with the gradient of the loss and the conversion to 16 bits read
    and write all logits. The other kernels and the three all-reduces process one number per token.

    Args:
        model: The model.
        plan: The plan.
    """
    rows, vocab = count_local_tokens(model, plan), -(-model.vocab // plan.tp)
    logits = float(rows) * vocab
    size, statistic_bytes = 2.0 * rows * model.hidden, 4.0 * rows
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
            CollectiveOp("sum after logits", kind, size, "tensor", "I", "logits"),
            *[CollectiveOp(f"{statistic} of the loss", "all_reduce", statistic_bytes, "tensor", "F")
              for statistic in ("largest", "targets", "sum")],
        )  # fmt: skip
    return LayerOps((Gemm("logits", rows, vocab, model.hidden),), passes, collectives)
