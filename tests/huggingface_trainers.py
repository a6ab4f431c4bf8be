"""Train a small Llama in stages with peft, Accelerate and Lightning, and compare its losses.

`python -m tests.huggingface_trainers` needs transformers, peft, accelerate and lightning. `make
versions` runs it in an environment of its own. Each run trains the stages of
`schedir.models.huggingface.cut` on two processes, and prints whether its losses equal those of the
uncut model in one process.
"""

from __future__ import annotations

import datetime
import sys
import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy

from schedir.models.huggingface import cut
from schedir.torch_pipelining import Schedule
from schedir.transports.local_processes import RankError, run_processes

RANKS, STAGES, MICROBATCHES, STEPS, LENGTH, VOCABULARY = 2, 4, 4, 4, 16, 64
PACKAGES = ("torch", "transformers", "peft", "accelerate", "lightning")


def make_model(uses_lora: bool) -> Any:
    """Return a model of `transformers` with the same weights in each process."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        vocab_size=VOCABULARY, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    if not uses_lora:
        return model
    peft: Any = import_module("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora).get_base_model()


def make_batches() -> list[Tensor]:
    """Return the tokens of each step."""
    torch.manual_seed(2)
    return [torch.randint(VOCABULARY, (2 * MICROBATCHES, LENGTH + 1)) for _ in range(STEPS)]


def compute_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of a microbatch."""
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make_optimizer(parameters: Any) -> Any:
    """Return an optimizer of the trained parameters."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def make_learning_rates(optimizer: Any) -> Any:
    """Return a scheduler that halves the learning rate after each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def train_uncut(uses_lora: bool, dtype: torch.dtype | None) -> list[float]:
    """Return the loss of each step of the uncut model. Autocast uses `dtype`, if there is one."""
    model = make_model(uses_lora)
    optimizer = make_optimizer(model.parameters())
    learning_rates = make_learning_rates(optimizer)
    losses = []
    for tokens in make_batches():
        optimizer.zero_grad()
        mb_losses = []
        for mb in tokens.chunk(MICROBATCHES):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = compute_loss(model(input_ids=mb[:, :-1]).logits, mb[:, 1:])
            loss.backward()
            mb_losses.append(loss.detach())
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(MICROBATCHES)
        optimizer.step()
        learning_rates.step()
        losses.append(torch.stack(mb_losses).mean().item())
    return losses


class Pipeline:
    """The stages of a rank, and a step of its schedule.

    Args:
        rank: The rank.
        uses_lora: True if the model has adapters of peft.
        options: The schedule and the runtime.
    """

    def __init__(self, rank: int, uses_lora: bool, options: dict[str, Any]) -> None:
        modules = cut(make_model(uses_lora), STAGES)
        own = (rank, rank + RANKS) if options["schedule"] == "interleaved" else (rank, 3 - rank)
        stages = [PipelineStage(modules[s], s, STAGES, torch.device("cpu")) for s in own]
        self.modules = torch.nn.ModuleList(modules[s] for s in own)
        self.is_first = 0 in own
        self.is_last = STAGES - 1 in own
        self.schedule = Schedule(stages, MICROBATCHES, compute_loss, **options)

    def step(self, tokens: Tensor) -> float | None:
        """Run the schedule on the tokens of a step. The rank of the last stage has the loss."""
        losses: list[Tensor] = []
        self.schedule.step(
            *((tokens[:, :-1],) if self.is_first else ()),
            target=tokens[:, 1:] if self.is_last else None,
            losses=losses,
        )
        return torch.stack(losses).mean().item() if losses else None


def train_plainly(pipeline: Pipeline, uses_autocast: bool) -> list[float | None]:
    """Train with a loop of our own."""
    optimizer = make_optimizer(pipeline.modules.parameters())
    learning_rates = make_learning_rates(optimizer)
    losses = []
    for tokens in make_batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=uses_autocast):
            losses.append(pipeline.step(tokens))
        optimizer.step()
        learning_rates.step()
    return losses


def train_with_accelerate(pipeline: Pipeline, uses_autocast: bool) -> list[float | None]:
    """Train with an optimizer and learning rates of an `Accelerator`."""
    accelerate: Any = import_module("accelerate")
    # Without `split_batches`, a prepared scheduler takes a step for each process.
    accelerator = accelerate.Accelerator(
        cpu=True,
        mixed_precision="bf16" if uses_autocast else "no",
        dataloader_config=accelerate.DataLoaderConfiguration(split_batches=True),
    )
    optimizer = make_optimizer(pipeline.modules.parameters())
    optimizer, learning_rates = accelerator.prepare(optimizer, make_learning_rates(optimizer))
    losses = []
    for tokens in make_batches():
        optimizer.zero_grad()
        with accelerator.autocast():
            losses.append(pipeline.step(tokens))
        optimizer.step()
        learning_rates.step()
    return losses


def train_with_lightning(pipeline: Pipeline, uses_autocast: bool) -> list[float | None]:
    """Train with a `LightningModule` with manual optimization, and a Trainer for each rank."""
    lightning: Any = import_module("lightning")
    losses: list[float | None] = []

    class PipelineModule(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.parts = pipeline.modules

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.parts.parameters())
            return [optimizer], [make_learning_rates(optimizer)]

        def training_step(self, tokens: Tensor) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            losses.append(pipeline.step(tokens))
            optimizer.step()
            self.lr_schedulers().step()

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        precision="bf16-mixed" if uses_autocast else "32-true",
    )  # fmt: skip
    batches: Any = make_batches()
    trainer.fit(PipelineModule(), torch.utils.data.DataLoader(batches, batch_size=None))
    return losses


TRAINERS: dict[str, Callable[[Pipeline, bool], list[float | None]]] = {
    "schedir": train_plainly,
    "accelerate": train_with_accelerate,
    "lightning": train_with_lightning,
}


def train_rank(rank: int, name: str, uses_lora: bool, uses_autocast: bool, options: Any) -> Any:
    """Return the loss of each step of a rank, None on a rank without the last stage."""
    warnings.simplefilter("ignore")
    return TRAINERS[name](Pipeline(rank, uses_lora, options), uses_autocast)


def compare(name: str, uses_lora: bool, uses_autocast: bool, options: Any) -> str:
    """Return "equal" if a trainer has the losses of the uncut model, else a description."""
    expected = train_uncut(uses_lora, torch.bfloat16 if uses_autocast else None)
    try:
        ranks = run_processes(
            train_rank, RANKS, name, uses_lora, uses_autocast, options, context=get_context("fork")
        )
    except RankError as error:
        return f"FAILED: {error}"
    (losses,) = (one for one in ranks if None not in one)
    return "equal" if losses == expected else f"DIFFERENT: {losses}, not {expected}"


def main() -> int:
    """Run all trainers, and print a table."""
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    print(f"{', '.join(versions)}, {datetime.date.today()}", flush=True)
    for package in PACKAGES:
        import_module(package)
    results = []
    for uses_lora, uses_autocast in ((False, False), (False, True), (True, False)):
        for name in TRAINERS:
            for schedule, runtime in (("interleaved", "torch"), ("zb_v", "schedir")):
                options = {"schedule": schedule, "runtime": runtime}
                results.append(compare(name, uses_lora, uses_autocast, options))
                words = (name, *["peft"] * uses_lora, *["bfloat16 autocast"] * uses_autocast)
                print(f"| {', '.join(words)} | {schedule}, {runtime} | {results[-1]} |", flush=True)
    return int(any(result != "equal" for result in results))


if __name__ == "__main__":
    sys.exit(main())
