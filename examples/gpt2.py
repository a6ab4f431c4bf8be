"""Train GPT-2 of Hugging Face, divided into four stages, on 1, 2 or 4 processes.

    python examples/gpt2.py                                 # one process has all four stages
    torchrun --nproc-per-node 4 examples/gpt2.py            # each of four processes has one stage

Both commands print the same losses to the last digit. The model has dropout and a tied weight: the
embedding of the first stage is the head of the last stage, in another process. Weights are random
and the training text is this file, so nothing is downloaded.
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

STAGES, MICROBATCHES, SIZE, CONTEXT, STEPS = 4, 8, 2, 64, 10


def summed_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the sum of the cross entropies of tokens; `grad_scale` of a step makes it a mean."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")


def batches(text: bytes) -> Tensor:
    """Yield the sequences of each step: CONTEXT + 1 bytes for each sample of each microbatch."""
    begins = torch.randint(len(text) - CONTEXT - 1, (STEPS, MICROBATCHES, SIZE, 1))
    return torch.tensor([*text])[begins + torch.arange(CONTEXT + 1)]


def main() -> None:
    """Train for ten steps of AdamW, as one of the ranks that torchrun has started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    dist.init_process_group("gloo", **alone)
    torch.set_num_threads(1)

    # Every process makes the whole model from one seed, and keeps its own part.
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=64, n_head=4, vocab_size=256, n_positions=CONTEXT,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    stages = cut(model, STAGES)
    ties = schedir.find_tied_weights(stages)  # The head of stages[3] is the embedding of stages[0].

    shape = PipelineShape(ranks=world, microbatches=MICROBATCHES, stages_per_rank=STAGES // world)
    program = schedir.compile(interleaved, shape, tied_weights=ties, clip_grad_norm=True)
    transport = GlooTransport(program)
    own = {number: stages[number] for number in shape.stages_on_rank[transport.rank]}
    weights = {p for stage in own.values() for p in stage.parameters()}
    executor = Executor(
        program, transport.rank, own, transport,
        loss=summed_loss, boundary=Boundary((SIZE, CONTEXT, config.n_embd)), tied_weights=ties,
        optimizer=torch.optim.AdamW(weights, lr=1e-3),
        gradients=GradientOptions(max_norm=1.0), seed=1,
    )  # fmt: skip

    for step, sequences in enumerate(batches(Path(__file__).read_bytes())):
        mean = 1 / sequences[..., 1:].numel()
        total = executor.step(sequences[..., :-1], sequences[..., 1:], grad_scale=mean)
        if total is not None:  # on the rank of the last stage
            print(f"step {step + 1:>2}  loss {float(total) * mean!r}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
