"""A mixture-of-experts GPT in pipeline stages. The experts are divided among replicas.

The attention is the same as in `gpt`. The feed-forward network of each layer is a router and
experts (see `MoEConfig`). With expert parallelism (GShard, arXiv 2006.16668) each of `ep` replicas
has some of the experts. Stages are split into segments at the all-to-alls of a program: d
dispatches tokens to experts, and c (combine) returns the outputs:

    embedding, attention, router | d | experts | c | sum, attention, router | d | experts | ...

Each stage sends the residual stream and the sum of the auxiliary losses of a microbatch to the next
stage. The last stage returns the logits and this sum, and `loss` adds both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from schedir.errors import ModelError, UsageError
from schedir.kernels.gelu import bias_gelu
from schedir.models import gpt
from schedir.models.gpt_segments import SegmentStep, StageSegment, require_splittable
from schedir.models.language_model import count_tokens as count_tokens
from schedir.models.moe_config import MoEConfig as MoEConfig
from schedir.models.parameter_init import LayerParameters
from schedir.models.partitioning import find_stage_layers
from schedir.models.routing_bias import make_load_term, make_routing_bias
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.parameters.buckets import mark_expert

Tensors = tuple[Tensor, ...]


def build_stage(
    config: MoEConfig,
    stage: int,
    stages: int,
    *,
    ep: int = 1,
    ep_rank: int = 0,
    layers_per_stage: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> MoEStage:
    """Build a pipeline stage with the experts of one rank of the expert-parallel group.

    Args:
        config: The configuration of the model.
        stage: The stage to build, from 0.
        stages: The number of stages.
        ep: The number of ranks among which the experts are divided. With more than one rank, only
            the segments of the stage can run (`split_stage`).
        ep_rank: The index of this rank in its group: the replica modulo `ep`.
        layers_per_stage: The number of layers of each stage (`split_layers`). None means that the
            layers are divided evenly.
        device: The device of the parameters.
        dtype: The type of the parameters.

    Raises:
        UsageError: The stage or the rank does not exist, the layers do not fit the stages, the
            first of several stages has no layer, or `ep` does not divide the experts.

    Example:
        >>> from schedir.models.moe_gpt import MoEConfig, build_stage, split_stage
        >>> stage = build_stage(MoEConfig(layers=2, experts=8), 0, 2, ep=4, ep_rank=1)
        >>> len(split_stage(stage)), [*stage.layers["0"].experts]
        (3, ['2', '3'])
    """
    layers = find_stage_layers(config.layers, stage, stages, layers_per_stage)
    if layers_per_stage is not None and not layers_per_stage[0]:
        raise UsageError(
            "layers_per_stage[0] is 0, but a mixture-of-experts model needs a layer there",
            fields=["layers_per_stage"],
        )
    if ep < 1 or config.experts % ep:
        raise UsageError(
            f"ep {ep} does not divide {config.experts} experts", fields=["ep", "experts"]
        )
    if not 0 <= ep_rank < ep:
        raise UsageError(f"ep_rank is {ep_rank}; it must be from 0 to {ep - 1}", fields=["ep_rank"])
    local_experts = config.experts // ep
    experts = range(ep_rank * local_experts, (ep_rank + 1) * local_experts)
    weights = LayerParameters.from_config(config, 0, None, {"device": device, "dtype": dtype})
    return MoEStage(config, layers, stage == 0, stage == stages - 1, experts, weights)


class MoEStage(gpt.Stage):
    """Consecutive layers of a mixture-of-experts GPT.

    The forward takes the residual stream (b, T, hidden) and the auxiliary loss (1,), and returns
    both. The first stage takes only int64 tokens of shape (b, T). The last stage returns logits
    instead of the residual stream. Parameters have the names that they have in a model of one stage
    and one rank.

    Args:
        config: The configuration of the model.
        layers: The indices of the stage's layers in the full model, from 0.
        is_first: True if the stage has the embedding.
        is_last: True if the stage has the head.
        experts: The indices of the experts of this rank.
        weights: The factory of the parameters of all layers.
    """

    def __init__(
        self,
        config: MoEConfig,
        layers: range,
        is_first: bool,
        is_last: bool,
        experts: range,
        weights: LayerParameters,
    ) -> None:
        def make_layer(_: object, index: int, weights: LayerParameters) -> MoELayer:
            return MoELayer(config, index, weights, experts)

        super().__init__(config, layers, is_first, is_last, weights, make_layer)
        self.has_all_experts = not layers or len(experts) == config.experts

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output of the stage, and the auxiliary loss of all layers up to this stage.

        Args:
            *inputs: The input of the stage, and the auxiliary loss. The first stage takes no
                auxiliary loss.

        Raises:
            ModelError: The rank has only some of the experts.
        """
        if not self.has_all_experts:
            raise ModelError(
                "the stage has only some of the experts, so it must be split into segments",
                hint="split_stage(stage), and compile(..., ep=2, stage_segments='dc')",
            )
        for segment in _make_segments(self):
            inputs = segment(*inputs)
        return inputs


class MoELayer(gpt.AttentionLayer):
    """A transformer layer with a router, and some of its experts.

    Args:
        config: The configuration of the model.
        index: The index of the layer in the model, from 0.
        weights: The factory of the layer's parameters.
        experts: The indices of the experts of this rank.
    """

    def __init__(
        self, config: MoEConfig, index: int, weights: LayerParameters, experts: range
    ) -> None:
        super().__init__(config, index, weights)
        self.num_experts = config.experts
        self.active = config.active
        self.aux_loss = config.aux_loss
        self.router = weights.make_column_linear("router", config.experts, bias=False)
        self.routing_bias: nn.Parameter | None = None
        if config.balance_rate:
            self.routing_bias = make_routing_bias(
                config.experts, config.balance_rate, weights.placement
            )
        self.experts = nn.ModuleDict(
            {str(e): Expert(weights, f"experts.{e}", config.expert_width) for e in experts}
        )
        for parameter in self.experts.parameters():
            mark_expert(parameter, experts.start // len(experts), config.experts // len(experts))

        self.has_shared_experts = config.shared_experts > 0
        if self.has_shared_experts:
            width = config.shared_experts * config.expert_width
            self.shared_experts = Expert(weights, "shared_experts", width)
        # A segment keeps a layer only if it names one of the layer's submodules. The segment after
        # the experts uses no parameters of the layer, so it names `output`.
        self.output = nn.Identity()

    def route(self, x: Tensor, aux: Tensor) -> Tensors:
        """Run the attention and the shared experts, and choose the experts of each token.

        Args:
            x: The residual stream, (b, T, hidden).
            aux: The auxiliary loss of earlier layers, (1,).

        Returns:
            Six tensors:

            - the tokens sorted by expert, of shape (b*T*active, hidden)
            - the number of tokens of each expert, of shape (experts,)
            - for each token, the factors of its experts' outputs, of shape (b*T, active)
            - the permutation that sorted the tokens, of shape (b*T*active,)
            - the residual stream, of shape (b, T, hidden)
            - the auxiliary loss, of shape (1,)
        """
        with self.use_dropout_stream():
            x, normed = self.run_attention(x)
            if self.has_shared_experts:
                x = self.add_feed_forward(self.shared_experts(normed), x)
        tokens = normed.view(-1, normed.shape[-1])
        logits = self.router(tokens)
        probabilities = logits.to(aux.dtype).softmax(-1)
        bias = self.routing_bias
        scores = probabilities if bias is None else probabilities + bias.detach()
        chosen_experts = scores.topk(self.active).indices
        chosen_probabilities = probabilities.gather(-1, chosen_experts)
        gates = chosen_probabilities / chosen_probabilities.sum(-1, keepdim=True)
        order = chosen_experts.view(-1).argsort(stable=True)
        counts = chosen_experts.view(-1).bincount(minlength=self.num_experts)
        # A token has one row for each expert that processes it.
        rows = tokens.unsqueeze(1).expand(-1, self.active, -1).reshape(-1, tokens.shape[-1])
        if self.training:
            share = counts.to(aux.dtype) / order.numel()
            balance = (share * probabilities.mean(0)).sum()
            aux = aux + self.aux_loss * self.num_experts * len(tokens) * balance
            if bias is not None:
                aux = aux + make_load_term(bias, counts)
        return rows[order], counts, gates, order, x, aux

    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of the experts of this rank.

        Args:
            rows: The tokens, sorted by the rank that sends them and then by expert, (rows, hidden).
                Rows after the last token are not used.
            counts: The number of tokens from each rank for each expert of this rank, (ranks *
                experts,). The numbers of the first rank come first.

        Returns:
            The outputs, in the same order as `rows`. Rows that are not used are zero.
        """
        sizes = counts.tolist()
        blocks = [*rows[: sum(sizes)].split(sizes)]
        for number, expert in enumerate(self.experts.values()):
            # The indices of this expert's blocks of rows, one from each rank that sends it tokens.
            expert_blocks = [k for k in range(number, len(sizes), len(self.experts)) if sizes[k]]
            if not expert_blocks:
                continue
            outputs = expert(torch.cat([blocks[k] for k in expert_blocks]))
            block_outputs = outputs.split([sizes[k] for k in expert_blocks])
            for k, output in zip(expert_blocks, block_outputs, strict=True):
                blocks[k] = output
        return F.pad(torch.cat(blocks), (0, 0, 0, len(rows) - sum(sizes)))

    def combine(self, rows: Tensor, gates: Tensor, order: Tensor, x: Tensor) -> Tensor:
        """Add the outputs of experts to the residual stream.

        Args:
            rows: The outputs, sorted by expert.
            gates: The factors of the experts' outputs, for each token.
            order: The permutation that sorted the tokens.
            x: The residual stream.
        """
        outputs = rows[order.argsort()].view(*gates.shape, -1)
        total = (outputs * gates.unsqueeze(-1)).sum(1).to(x.dtype).view_as(x)
        with self.use_dropout_stream():
            # The context begins the layer's random stream again. Draw the masks of `route` once
            # more, so that the next mask is a new one.
            for _ in range(1 + self.has_shared_experts if self.dropout_rate else 0):
                F.dropout(x.detach(), self.dropout_rate)
            return self.add_feed_forward(total, x)


class Expert(nn.Module):
    """A feed-forward network for some of the tokens.

    Args:
        weights: The factory of the layer's parameters.
        name: The name of the expert in the layer.
        width: The number of hidden units.
    """

    def __init__(self, weights: LayerParameters, name: str, width: int) -> None:
        super().__init__()
        self.up = weights.make_column_linear(f"{name}.up", width)
        self.down = weights.make_row_linear(f"{name}.down", width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the output for each token.

        Args:
            tokens: The tokens, (rows, hidden).
        """
        assert self.up.bias is not None
        outputs: Tensor = self.down(bias_gelu(self.up.project(tokens), self.up.bias))
        return outputs


def split_stage(stage: MoEStage) -> list[nn.Module]:
    """Split a stage into its segments at the all-to-alls of its layers, in order.

    The segments are the stages of a program whose `stage_segments` has "dc" for each layer. All
    segments share the parameters of the stage.

    Args:
        stage: The stage.

    Raises:
        ModelError: The stage is the full model and has a tied weight, which two segments would use.
    """
    require_splittable(stage)
    return _make_segments(stage)


def _make_segments(stage: MoEStage) -> list[nn.Module]:
    embedding_names = ["embedding", "positions"] * (stage.embedding is not None)
    segments = [[SegmentStep("", embedding_names, _embed)]]
    for key, layer in stage.layers.items():
        assert isinstance(layer, MoELayer)
        names = ["attention_norm", "qkv", "proj", "mlp_norm", "router"]
        names += ["shared_experts"] * layer.has_shared_experts
        names += ["routing_bias"] * (layer.routing_bias is not None)
        segments[-1].append(SegmentStep(key, names, MoELayer.route))
        segments.append([SegmentStep(key, ["experts"], _run_experts)])
        segments.append([SegmentStep(key, ["output"], _combine)])
    segments[-1].append(SegmentStep("", ["norm", "head"] * (stage.head is not None), _apply_head))
    return [StageSegment(stage, steps) for steps in segments]


def build_boundaries(
    config: MoEConfig, segments_per_stage: Sequence[int], boundary: Boundary, ep: int = 1
) -> dict[int, tuple[Boundary, ...]]:
    """Return the boundaries after each segment of stages.

    Args:
        config: The configuration of the model.
        segments_per_stage: The number of segments of each stage: 1, or 2n + 1 for n layers.
        boundary: The residual stream of a microbatch, (b, T, hidden).
        ep: The number of ranks among which the experts are divided.

    Returns:
        The boundary after each segment except the last, by the index of the segment.

    Example:
        >>> from schedir.models.moe_gpt import MoEConfig, build_boundaries
        >>> from schedir.runtime import Boundary
        >>> config = MoEConfig(experts=4, hidden=64)
        >>> boundaries = build_boundaries(config, (3, 3), Boundary((1, 8, 64)), ep=2)
        >>> str(boundaries[0][0]), str(boundaries[1][0])
        ('[16, 64] of torch.float32, received as [32, 64]', \
'[32, 64] of torch.float32, received as [16, 64]')
    """
    *batch, hidden = boundary.shape
    tokens = math.prod(batch)
    rows = tokens * config.active
    capacity = config.compute_capacity(tokens, ep)
    wide_dtype = torch.promote_types(boundary.dtype, torch.float32)
    stream = boundary, Boundary((1,), wide_dtype)
    local_boundaries = (
        Boundary((tokens, config.active), wide_dtype),
        Boundary((rows,), torch.int64),
        *stream,
    )
    counts = Boundary((config.experts,), torch.int64)
    dispatch_boundary = Boundary((rows, hidden), boundary.dtype, received_shape=(capacity, hidden))
    combine_boundary = Boundary((capacity, hidden), boundary.dtype, received_shape=(rows, hidden))
    layer_boundaries = [
        (dispatch_boundary, counts, *local_boundaries),
        (combine_boundary, *local_boundaries),
    ]
    boundaries: list[tuple[Boundary, ...]] = []
    for segments in segments_per_stage:
        boundaries += [*layer_boundaries * (segments // 2), stream]
    return dict(enumerate(boundaries[:-1]))


def loss(output: tuple[Tensor, Tensor], targets: Tensor, tp: ProcessGroup | None = None) -> Tensor:
    """Return the sum of the cross entropies of all tokens and of the auxiliary losses.

    Args:
        output: The logits (b, T, V) and the auxiliary loss (1,), from the last stage.
        targets: int64 of shape (b, T). Tokens with the target `IGNORE_INDEX` are ignored.
        tp: Must be None, because these models have no tensor parallelism.
    """
    logits, aux = output
    return gpt.loss(logits, targets, tp) + aux.sum()


def _embed(stage: gpt.Stage, x: Tensor, *aux: Tensor) -> Tensors:
    x = stage.embed(x)
    return x, *(aux or [x.new_zeros(1, dtype=torch.promote_types(x.dtype, torch.float32))])


def _apply_head(stage: gpt.Stage, x: Tensor, aux: Tensor) -> Tensors:
    return stage.apply_head(x), aux


def _run_experts(layer: MoELayer, rows: Tensor, counts: Tensor, *local_values: Tensor) -> Tensors:
    return layer.run_experts(rows, counts), *local_values


def _combine(
    layer: MoELayer, rows: Tensor, gates: Tensor, order: Tensor, x: Tensor, aux: Tensor
) -> Tensors:
    return layer.combine(rows, gates, order, x), aux
