"""Train a small GPT of megatron-core on two pipeline ranks, with a schedule of schedir.

    torchrun --nproc-per-node 2 examples/megatron_gpt.py          # zb_h1
    torchrun --nproc-per-node 2 examples/megatron_gpt.py gpipe    # another schedule
    torchrun --nproc-per-node 2 examples/megatron_gpt.py megatron # Megatron's own 1F1B

Each command prints the loss of each of five steps. All commands print the same losses. The
processes use GPUs and NCCL, or CPUs and Gloo if there are no GPUs.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from schedir.megatron import forward_backward

VOCABULARY, LENGTH, MICROBATCHES, MICROBATCH_SIZE, STEPS = 64, 32, 8, 2, 5
HAS_GPUS = torch.cuda.device_count() > 1
DEVICE = torch.device("cuda" if HAS_GPUS else "cpu")


def build_model() -> DistributedDataParallel:
    """Build the stage of this rank, in Megatron's DistributedDataParallel."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(DEVICE))


def microbatches(step: int) -> Iterator[Tensor]:
    """Yield the tokens of the microbatches of a step, the same ones on all ranks."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        starts = torch.randint(VOCABULARY, (MICROBATCH_SIZE, 1), generator=generator)
        yield ((starts + torch.arange(LENGTH + 1)) % VOCABULARY).to(DEVICE)


def forward_step(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Run a stage on the next microbatch, as the `forward_step` of pretrain_gpt.py does."""
    tokens = next(data)
    positions = torch.arange(LENGTH, device=DEVICE).expand(MICROBATCH_SIZE, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, device=DEVICE).triu(1) > 0.5  # True: hidden
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), compute_loss


def compute_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # Megatron divides `loss` in place


def train(schedule: str) -> None:
    """Train for five steps of AdamW. The last rank prints the losses."""
    step_function = (
        get_forward_backward_func() if schedule == "megatron" else forward_backward(schedule)
    )
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        model.zero_grad_buffer()
        losses = step_function(
            forward_step_func=forward_step,
            data_iterator=microbatches(step),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICROBATCH_SIZE,
        )
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()  # Megatron adds each `grad` that is set to `main_grad`
        if losses:
            print(
                f"step {step + 1}: loss {sum(float(x['loss']) for x in losses) / len(losses):.4f}"
            )


def use_cpus() -> None:
    """Replace the functions of CUDA that megatron-core calls in each run."""
    create_zeros = torch.zeros

    def zeros(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return create_zeros(*args, device="cpu" if device == "cuda" else device, **kwargs)

    torch.zeros = zeros
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda device=None: None
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()


if __name__ == "__main__":
    dist.init_process_group("nccl" if HAS_GPUS else "gloo")
    if HAS_GPUS:
        torch.cuda.set_device(dist.get_rank())
    else:
        use_cpus()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    torch.manual_seed(dist.get_rank())
    if HAS_GPUS:
        model_parallel_cuda_manual_seed(1)
    train(sys.argv[1] if len(sys.argv) > 1 else "zb_h1")
    dist.destroy_process_group()
