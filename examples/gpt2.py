"""Train Hugging Face's GPT-2 in four stages on 1, 2 or 4 processes.

    python examples/gpt2.py                                 # one process has all four stages
    torchrun --nproc-per-node 4 examples/gpt2.py            # each of four processes has one stage

Both commands print the loss of each of ten steps, with the same values in all digits. The model has
dropout and a tied weight: the embedding of the first stage is the head of the last stage, which can
be in another process. Weights are random and the training text is this file, so nothing is
downloaded.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import schedir
from schedir import PipelineShape
from schedir.models.huggingface import cut
from schedir.runtime import Boundary, Executor, GlooTransport, GradientOptions
from schedir.schedules import interleaved

STAGES, MICROBATCHES, MICROBATCH_SIZE, CONTEXT, STEPS = 4, 8, 2, 64, 10


def summed_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the sum of the cross entropies of tokens. `grad_scale` of a step makes it a mean."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")


def sample_sequences(text: bytes) -> Tensor:
    """Return the sequences of all steps: CONTEXT + 1 bytes for each sample of each microbatch."""
    starts = torch.randint(len(text) - CONTEXT - 1, (STEPS, MICROBATCHES, MICROBATCH_SIZE, 1))
    return torch.tensor([*text])[starts + torch.arange(CONTEXT + 1)]


def main() -> None:
    """Train for ten steps of AdamW as one of the ranks that torchrun started."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    single_process = (
        {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world_size == 1 else {}
    )
    dist.init_process_group("gloo", **single_process)
    torch.set_num_threads(1)

    # Each process creates the full model from the same seed, and trains only its local stages.
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=64, n_head=4, vocab_size=256, n_positions=CONTEXT,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    stages = cut(model, STAGES)
    # The head of stages[3] is the embedding of stages[0].
    tied_weights = schedir.find_tied_weights(stages)

    shape = PipelineShape(
        ranks=world_size, microbatches=MICROBATCHES, stages_per_rank=STAGES // world_size
    )
    program = schedir.compile(interleaved, shape, tied_weights=tied_weights, clip_grad_norm=True)
    transport = GlooTransport(program)
    local_stages = {number: stages[number] for number in shape.stages_on_rank[transport.rank]}
    parameters = {p for stage in local_stages.values() for p in stage.parameters()}
    executor = Executor(
        program, transport.rank, local_stages, transport,
        loss=summed_loss, boundary=Boundary((MICROBATCH_SIZE, CONTEXT, config.n_embd)),
        tied_weights=tied_weights,
        optimizer=torch.optim.AdamW(parameters, lr=1e-3),
        gradients=GradientOptions(max_norm=1.0), seed=1,
    )  # fmt: skip

    for step, sequences in enumerate(sample_sequences(Path(__file__).read_bytes())):
        grad_scale = 1 / sequences[..., 1:].numel()
        loss_sum = executor.step(sequences[..., :-1], sequences[..., 1:], grad_scale=grad_scale)
        if loss_sum is not None:  # only the rank of the last stage has the loss
            print(f"step {step + 1:>2}  loss {float(loss_sum) * grad_scale!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
