"""Train Hugging Face's Llama with a schedule of torch or, after a change of one line, of schedir.

    python examples/torch_drop_in.py theirs     # torch's own schedule
    python examples/torch_drop_in.py torch      # a schedule of schedir, in torch's runtime
    python examples/torch_drop_in.py schedir    # the same schedule, in schedir's executor
    python examples/torch_drop_in.py torch runs/llama  # also save a checkpoint in runs/llama

Each command prints the loss of each of five steps. The first three commands print the same losses.
If you repeat the last command, it continues from the checkpoint with five more steps.

The script starts four processes. `torchrun --nproc-per-node 4` can start them, too. Weights are
random and the training text is this file, so nothing is downloaded.

The head of the last stage and the embedding of the first stage are one tied weight. torch's
schedule does not sum the gradients of its two copies, so the script sums them. schedir sums them
itself.
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

RANKS, STAGES, MICROBATCHES, MICROBATCH_SIZE, CONTEXT, STEPS = 4, 8, 8, 2, 32, 5
CONFIG = LlamaConfig(
    num_hidden_layers=8, hidden_size=64, intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=CONTEXT,
    tie_word_embeddings=True, attn_implementation="eager", use_cache=False,
)  # fmt: skip


def get_checkpoint_name(stage: int, name: str) -> str:
    """Return the name of a parameter in the checkpoint. It is the name in the complete model."""
    return name


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main(rank: int, runtime: str, folder: str = "") -> None:
    """Train for five steps of AdamW as one of four ranks.

    `runtime` is "theirs" for torch's own schedule. Otherwise it is the `runtime` of schedir's
    `Schedule`: "torch" or "schedir". If there is a checkpoint in `folder`, training continues from
    it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).train()
    stage_modules = cut(model, STAGES)
    local_stages = [
        PipelineStage(stage_modules[number], number, STAGES, torch.device("cpu"))
        for number in range(rank, STAGES, RANKS)
    ]
    # The head of stage_modules[7] is the embedding of stage_modules[0].
    tied_weights = find_tied_weights(stage_modules)
    tied_group = dist.new_group([0, RANKS - 1])  # the ranks with a copy of the tied weight

    if runtime == "theirs":
        schedule = ScheduleInterleaved1F1B(local_stages, MICROBATCHES, loss)
    else:
        schedule = Schedule(
            local_stages,
            MICROBATCHES,
            loss,
            schedule=interleaved,
            tied_weights=tied_weights,
            runtime=runtime,
        )

    parameters = {p for stage in local_stages for p in stage.submod.parameters()}
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    text = torch.tensor([*Path(__file__).read_bytes()])
    checkpoint = (
        load(schedule, folder, optimizer=optimizer, name_map=get_checkpoint_name)
        if folder
        else None
    )
    first_step = checkpoint["step"] if checkpoint else 0
    for step in range(first_step, first_step + STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (MICROBATCHES * MICROBATCH_SIZE, 1))
        tokens = text[starts + torch.arange(CONTEXT + 1)]
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens[:, :-1])
        elif rank == RANKS - 1:
            schedule.step(target=tokens[:, 1:], losses=losses)
            print(f"step {step + 1}  loss {torch.stack(losses).mean().item()!r}", flush=True)
        else:
            schedule.step()
        # schedir's schedule has already summed the gradients of the tied weight.
        if runtime == "theirs" and rank in (0, RANKS - 1):
            dist.all_reduce(model.lm_head.weight.grad, group=tied_group)
        optimizer.step()
        optimizer.zero_grad()
    if folder:
        save(
            schedule,
            folder,
            step=first_step + STEPS,
            optimizer=optimizer,
            name_map=get_checkpoint_name,
        )


def run_rank(rank: int, runtime: str, init_method: str, *folder: str) -> None:
    """Create the process group, and run `main` as one of its ranks."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=RANKS)
    main(rank, runtime, *folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    runtime = sys.argv[1] if len(sys.argv) > 1 else "torch"
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), runtime, "env://", *sys.argv[2:])
    else:
        with TemporaryDirectory() as store:
            init_method = Path(store, "store").as_uri()
            torch.multiprocessing.spawn(run_rank, (runtime, init_method, *sys.argv[2:]), RANKS)
