"""Train a small GPTModel of megatron-core on CPUs, with Megatron's schedule or one of schedir.

A process has the model chunks of one pipeline rank. Megatron's DistributedDataParallel holds the
gradients, and its `finalize_model_grads` ends each step.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from schedir import Program, compile, from_text, to_text

VOCABULARY, SEQUENCES = 64, 2


@dataclass(frozen=True)
class Case:
    """The settings of a run.

    `is_vee` builds the model for the schedule's placement. `lengths` are the sequence lengths of
    the microbatches, or `length` for all. `frozen` are parts of the names of parameters that are
    not trained. `linears` is "delayed" or "immediate" for the layers of `megatron_delayed_linears`,
    with or without delayed gradients. `aligned` starts reductions as `--align-grad-reduce` does.
    `settings` are fields of TransformerConfig, and `ddp` of DistributedDataParallelConfig.
    """

    pp: int = 2
    tp: int = 1
    chunks: int = 1
    microbatches: int = 4
    layers: int = 4
    hidden: int = 32
    length: int = 16
    lengths: tuple[int, ...] = ()
    tied: bool = True
    steps: int = 2
    forward_only: bool = False
    is_vee: bool = False
    frozen: tuple[str, ...] = ()
    linears: str = ""
    aligned: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The losses of a process, and its `main_grad`s after the last step by stage and name.

    `max_stored` is the largest number of gradients that a layer of `Case.linears` stored.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    max_stored: int


def _zeros_on_cpu(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """Create on the CPU the zeros that Megatron requests on a GPU."""
    device = "cpu" if str(device).startswith("cuda") else device
    zeros: Tensor = _torch_zeros(*args, device=device, **kwargs)
    return zeros


_torch_zeros: Any = torch.zeros


class _AnyStream:
    """A CUDA stream or event that does nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self


@contextmanager
def megatron_on_cpu(case: Case) -> Iterator[None]:
    """Initialize Megatron's process groups, and replace the GPU functions it needs by the CPU."""
    warnings.simplefilter("ignore")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda device=None: None
    cuda.stream = lambda stream: nullcontext()
    cuda.Stream = lambda *_, **__: _AnyStream()
    cuda.current_stream = lambda device=None: _AnyStream()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    @contextmanager
    def fork(self: Any, name: str = "") -> Iterator[None]:
        yield

    def make_norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        norm = torch.nn.LayerNorm(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    moe_utils.te_general_gemm = None  # it is undefined without Transformer Engine
    layers._grad_accum_fusion_available = True
    kernels: Any = FusedKernels
    sys.modules["fused_weight_gradient_mlp_cuda"] = kernels
    layers.fused_weight_gradient_mlp_cuda = kernels
    random.CudaRNGStatesTracker.fork = fork
    random._get_cuda_rng_state = lambda *_, **__: torch.zeros(1, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *_, **__: None
    WrappedTorchNorm.__new__ = make_norm
    _initialize_groups(case.tp, case.pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(
        case.chunks if case.chunks > 1 else None
    )
    parallel_state.set_virtual_pipeline_model_parallel_rank(0 if case.chunks > 1 else None)
    cpu_cuda = patch.object(Tensor, "cuda", lambda tensor, *_, **__: tensor)
    with patch.object(torch, "zeros", _zeros_on_cpu), cpu_cuda:
        yield


def _initialize_groups(tp: int, pp: int) -> None:
    """Initialize Megatron's process groups, except if the process has groups of these sizes.

    Megatron creates about 34 groups, which takes longer than a small run.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if sizes == (tp, pp):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp
    )


def train(
    case: Case, forward_backward: Any, provider: Callable[[Any], Any] = lambda build: build
) -> Result:
    """Train for some steps, and return the losses and gradients of this process."""
    chunks = build_chunks(case, provider)
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(case.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        reported = run_step(case, forward_backward, chunks, step)
        losses += [float(report["lm loss"][0]) for report in reported]
        if not case.forward_only:
            gradients = {
                f"{first_layer(chunk)} {name}": parameter.main_grad.clone()
                for chunk in chunks
                for name, parameter in chunk.named_parameters()
                if parameter.requires_grad
            }
            for parameter in parameters:
                parameter.grad = parameter.main_grad.to(parameter.dtype)
            optimizer.step()
            optimizer.zero_grad()
    modules = [module for chunk in chunks for module in chunk.modules()]
    max_stored = max(getattr(module, "max_stored", 0) for module in modules)
    return Result(losses, gradients, max_stored)


def run_step(case: Case, forward_backward: Any, chunks: list[Any], step: int) -> list[Any]:
    """Call a function as Megatron's training loop does, and return what it reports."""
    data = [make_batches(case, step) for _ in chunks]
    several = case.chunks > 1
    reported: list[Any] = forward_backward(
        forward_step_func=forward_step,
        data_iterator=data if several else data[0],
        model=chunks if several else chunks[0],
        num_microbatches=case.microbatches,
        seq_length=case.length,
        micro_batch_size=SEQUENCES,
        decoder_seq_length=case.length,
        forward_only=case.forward_only,
    )
    return reported


def first_layer(chunk: Any) -> int:
    """Return the number of the first layer of a chunk."""
    from megatron.core.utils import get_attr_wrapped_model

    return int(get_attr_wrapped_model(chunk, "decoder").layers[0].layer_number)


def build_chunks(case: Case, provider: Callable[[Any], Any]) -> list[Any]:
    """Build the chunks of this rank as Megatron's `get_model` does."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    several = case.chunks > 1
    settings: dict[str, Any] = {
        "num_layers": case.layers,
        "hidden_size": case.hidden,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.chunks if several else None,
        "microbatch_group_size_per_vp_stage": case.pp if several else None,
        "overlap_p2p_comm": several,
        "batch_p2p_comm": not several,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        **case.settings,
    }
    config = TransformerConfig(**settings)
    config.delay_wgrad_compute = case.linears == "delayed"
    experts = config.num_moe_experts

    def build(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
        spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
        if case.linears:
            replace_linears(spec)
        return GPTModel(
            config,
            spec,
            VOCABULARY,
            case.length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=case.tied,
            vp_stage=vp_stage,
        )

    ddp_config = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": config.bf16,
            "overlap_grad_reduce": False,
            "delay_wgrad_compute": config.delay_wgrad_compute,
            **case.ddp,
        }
    )
    build, chunks = provider(build), []
    for number in range(case.chunks):
        vp_stage = number if several else None
        model = build(
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            vp_stage=vp_stage,
        )
        fill_weights(model, case)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in case.frozen))
        if config.bf16:
            model = Float16Module(config, model)
        chunks.append(
            DistributedDataParallel(config, ddp_config, model, disable_bucketing=number > 0)
        )
    if ddp_config.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = functions if several else functions[0]
    if case.aligned:
        starts = [chunk.start_grad_sync for chunk in chunks]
        config.grad_sync_func = starts if several else starts[0]
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def replace_linears(spec: Any) -> None:
    """Replace the linears of a layer's attention, MLP and experts by `megatron_delayed_linears`."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    from tests.cpu.megatron_delayed_linears import DelayedGroupedLinear, DelayedLinear

    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    attention.linear_qkv = attention.linear_proj = DelayedLinear
    if hasattr(mlp, "experts"):
        linears = MLPSubmodules(linear_fc1=DelayedGroupedLinear, linear_fc2=DelayedGroupedLinear)
        mlp.experts = ModuleSpec(module=TEGroupedMLP, submodules=linears)
    else:
        mlp.linear_fc1 = mlp.linear_fc2 = DelayedLinear


class FusedKernels:
    """Megatron's kernels for fused gradient accumulation, on the CPU."""

    @staticmethod
    @torch.no_grad()
    def wgrad_gemm_accum_fp32(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add a weight gradient to `main_grad`."""
        main_grad.add_(grad_output.t() @ input)


def fill_weights(model: Any, case: Case) -> None:
    """Fill each weight from the number of its layer, so that all layouts have the same model."""
    from megatron.core import parallel_state

    layers = model.decoder.layers
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        for position, layer in enumerate(layers):
            if name.startswith(f"decoder.layers.{position}."):
                name = name.replace(f"layers.{position}.", f"layer {layer.layer_number}: ", 1)
                break
        if case.tied and ("word_embeddings" in name or "output_layer" in name):
            name = "word embeddings"
        seed = zlib.crc32(name.encode()) + tp_rank * bool(
            getattr(parameter, "tensor_model_parallel", False)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + is_norm)


def make_batches(case: Case, step: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the microbatches of a step: tokens, labels, a loss mask, an attention mask, positions.

    The masks have different numbers of tokens.
    """
    from megatron.core import parallel_state

    seed = 100 + step + 17 * parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(seed)
    for length in case.lengths or case.microbatches * (case.length,):
        mask = torch.tril(torch.ones(1, 1, length, length)) < 0.5
        tokens = torch.randint(VOCABULARY, (SEQUENCES, length + 1), generator=generator)
        loss_mask = (torch.rand(SEQUENCES, length, generator=generator) < 0.8).float()
        positions = torch.arange(length).expand(SEQUENCES, -1)
        yield tokens[:, :-1], tokens[:, 1:], loss_mask, mask, positions


def forward_step(data: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Run a chunk on the next microbatch, as pretrain_gpt.py does."""
    tokens, labels, loss_mask, mask, positions = next(data)
    output = model(tokens, positions, mask, labels=labels)
    return output, partial(compute_loss, loss_mask)


def compute_loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the summed loss, the number of tokens, and a report, as pretrain_gpt.py does."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().view(1), num_tokens.view(1).float()])
    return loss, num_tokens, {"lm loss": report}


class Comparison(NamedTuple):
    """The runs of a process with Megatron's schedule and with one of schedir.

    `losses` are those of Megatron's last stage, and `own_losses` those of this process.
    `wrong` are the names of gradients that differ in a bit from Megatron's. `max_stored` is that of
    the run with the schedule of schedir.
    """

    losses: list[float]
    own_losses: list[float]
    wrong: list[str]
    gradients: int
    max_stored: int


def compare(case: Case, schedule: Any) -> Comparison:
    """Train with Megatron's schedule and with one of schedir, and compare all processes."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    import schedir.megatron

    with megatron_on_cpu(case):
        several = case.chunks if case.chunks > 1 else None
        megatron_case = replace(case, linears="immediate") if case.linears else case
        theirs = train(megatron_case, get_forward_backward_func(case.pp, several))
        provider = partial(schedir.megatron.model_provider, schedule=schedule)
        ours = train(
            case,
            schedir.megatron.forward_backward(schedule),
            provider if case.is_vee else lambda build: build,
        )
        # A pickle of arrays takes a tenth of the time of a pickle of tensors.
        arrays = {name: gradient.numpy() for name, gradient in theirs.gradients.items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (dist.get_rank(), theirs.losses, arrays))
    # In a vee, a stage is on another rank of the same pipeline, whose index is the same.
    index = dist.get_rank()
    ranks = case.tp * (dist.get_world_size() // case.tp // case.pp)  # processes of a pipeline rank
    pipeline = [one for one in everyone if one[0] % ranks == index % ranks]
    wanted = {name: g for _, _, gradients in pipeline for name, g in gradients.items()}
    wrong = [
        name
        for name, gradient in ours.gradients.items()
        if not torch.equal(gradient, torch.from_numpy(wanted[name]))
    ]
    losses = [loss for _, megatron_losses, _ in pipeline for loss in megatron_losses]
    return Comparison(losses, ours.losses, wrong, len(ours.gradients), ours.max_stored)


def interleaved_with_crossed_messages() -> Program:
    """Return a program in which rank 1 receives two activations in the wrong order."""
    program = compile(
        "interleaved", ranks=2, microbatches=4, stages_per_rank=2, progress_model="per_edge"
    )
    first, second = "  recv_act 1.1\n", "  recv_act 3.0\n"
    text = to_text(program).replace(second, "").replace(first, second + first)
    return from_text(text)
