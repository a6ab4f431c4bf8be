"""Train Llama of Hugging Face under torch's pipeline, or under schedir by changing one line.

    python examples/torch_drop_in.py theirs     # torch's own schedule
    python examples/torch_drop_in.py torch      # a schedule of schedir, in torch's runtime
    python examples/torch_drop_in.py schedir    # the same schedule, in schedir's executor
    python examples/torch_drop_in.py torch runs/llama  # also save there; again: five more steps

The script starts four processes, and `torchrun --nproc-per-node 4` can start them, too.  The first
three commands print the same losses.  Weights are random and the training text is this file, so
nothing is downloaded.

Five tensors pass between two stages: hidden states, a mask, positions, which are integers, and two
rotary tables.  Only the hidden states have a gradient.  The head of the last stage is the embedding
of the first one.  torch does not sum their gradients, so the script does.
"""

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask

from schedir import find_tied_weights
from schedir.checkpoints import load, save
from schedir.schedules import interleaved
from schedir.torch_pipelining import Schedule

RANKS, STAGES, MICROBATCHES, SIZE, CONTEXT, STEPS = 4, 8, 8, 2, 32, 5
CONFIG = LlamaConfig(
    num_hidden_layers=8, hidden_size=64, intermediate_size=128, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=CONTEXT,
    tie_word_embeddings=True, attn_implementation="eager", use_cache=False,
)  # fmt: skip


class Stage(nn.Module):
    """Some of Llama's layers; the first stage has its embedding, too, the last its head."""

    def __init__(self, model: LlamaForCausalLM, number: int, stages: int) -> None:
        super().__init__()
        inner, each = model.model, len(model.model.layers) // stages
        self.config = model.config
        self.layers = inner.layers[number * each : (number + 1) * each]
        self.first, self.last = number == 0, number == stages - 1
        if self.first:
            self.embedding, self.rotary = inner.embed_tokens, inner.rotary_emb
        if self.last:
            self.norm, self.head = inner.norm, model.lm_head

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        places: Tensor | None = None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Tokens, or what the stage before gives, to what the next takes or logits."""
        if self.first:
            places = torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)
            x = self.embedding(x)
            cos, sin = self.rotary(x, places)
            mask = create_causal_mask(self.config, x, None, None, position_ids=places)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=(cos, sin))
        return self.head(self.norm(x)) if self.last else (x, mask, places, cos, sin)


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def in_model(stage: int, name: str) -> str:
    """The name in the whole model of what a stage has: its first layer is that of the model."""
    each = CONFIG.num_hidden_layers // STAGES
    return re.sub(r"^layers\.(\d+)", lambda k: f"layers.{stage * each + int(k[1])}", name)


def main(rank: int, how: str, folder: str = "") -> None:
    """Five steps of AdamW as one of four ranks, under a schedule of torch's, or of ours; with a
    folder from the checkpoint on that is there."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).train()
    parts = [Stage(model, number, STAGES) for number in range(STAGES)]
    own = [
        PipelineStage(parts[number], number, STAGES, torch.device("cpu"))
        for number in range(rank, STAGES, RANKS)
    ]
    tied = find_tied_weights(parts)  # parts[7].head.weight is parts[0].embedding.weight
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
    state = load(schedule, folder, optimizer=optimizer, name_map=in_model) if folder else None
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
        save(schedule, folder, step=first + STEPS, optimizer=optimizer, name_map=in_model)


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
