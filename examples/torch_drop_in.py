"""Train Llama of Hugging Face with a schedule of torch or, by changing one line, of schedir.

    python examples/torch_drop_in.py theirs     # torch's own schedule
    python examples/torch_drop_in.py torch      # a schedule of schedir, in torch's runtime
    python examples/torch_drop_in.py schedir    # the same schedule, in schedir's executor
    python examples/torch_drop_in.py torch runs/llama  # also save there; again: five more steps

The script starts four processes, and `torchrun --nproc-per-node 4` can start them, too.  The first
three commands print the same losses.  Weights are random and the training text is this file, so
nothing is downloaded.

The head of the last stage and the embedding of the first stage are one tied weight. torch does not
sum the gradients of its two copies, so the script sums them.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from transformers import LlamaConfig, LlamaForCausalLM

from schedir import find_tied_weights
from schedir.checkpoints import load, save
from schedir.models.huggingface import cut
from schedir.schedules import interleaved
from schedir.torch_pipelining import Schedule

RANKS, STAGES, MICROBATCHES, SIZE, CONTEXT, STEPS = 4, 8, 8, 2, 32, 5
CONFIG = LlamaConfig(
    num_hidden_layers=8, hidden_size=64, intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=CONTEXT,
    tie_word_embeddings=True, attn_implementation="eager", use_cache=False,
)  # fmt: skip


def names(stage: int, name: str) -> str:
    """Return the name of a parameter in the checkpoint: that in the undivided model."""
    return name


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main(rank: int, how: str, folder: str = "") -> None:
    """Train for five steps of AdamW as one of four ranks, with a schedule of torch or of schedir.

    If there is a checkpoint in `folder`, training continues from it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).train()
    parts = cut(model, STAGES)
    own = [
        PipelineStage(parts[number], number, STAGES, torch.device("cpu"))
        for number in range(rank, STAGES, RANKS)
    ]
    tied = find_tied_weights(parts)  # The head of parts[7] is the embedding of parts[0].
    ends = dist.new_group([0, RANKS - 1])  # who has a copy of it

    if how == "theirs":
        schedule = ScheduleInterleaved1F1B(own, MICROBATCHES, loss)
    else:
        schedule = Schedule(
            own, MICROBATCHES, loss, schedule=interleaved, tied_weights=tied, runtime=how
        )

    weights = {p for stage in own for p in stage.submod.parameters()}
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    text = torch.tensor([*Path(__file__).read_bytes()])
    state = load(schedule, folder, optimizer=optimizer, name_map=names) if folder else None
    first = state["step"] if state else 0
    for step in range(first, first + STEPS):
        begins = torch.randint(len(text) - CONTEXT - 1, (MICROBATCHES * SIZE, 1))
        tokens = text[begins + torch.arange(CONTEXT + 1)]
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens[:, :-1])
        elif rank == RANKS - 1:
            schedule.step(target=tokens[:, 1:], losses=losses)
            print(f"step {step + 1}  loss {torch.stack(losses).mean().item()!r}", flush=True)
        else:
            schedule.step()
        if how == "theirs" and rank in (0, RANKS - 1):  # ours has added them up
            dist.all_reduce(model.lm_head.weight.grad, group=ends)
        optimizer.step()
        optimizer.zero_grad()
    if folder:
        save(schedule, folder, step=first + STEPS, optimizer=optimizer, name_map=names)


def start(rank: int, how: str, meeting: str, *folder: str) -> None:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    main(rank, how, *folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    how = sys.argv[1] if len(sys.argv) > 1 else "torch"
    if "RANK" in os.environ:
        start(int(os.environ["RANK"]), how, "env://", *sys.argv[2:])
    else:
        with TemporaryDirectory() as store:
            meeting = Path(store, "store").as_uri()
            torch.multiprocessing.spawn(start, (how, meeting, *sys.argv[2:]), RANKS)
