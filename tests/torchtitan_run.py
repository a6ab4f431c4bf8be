"""Run torchtitan's own trainer on CPUs, and print its losses and norms.

`torchrun --nproc-per-node 2 -m tests.torchtitan_run --schedule zb_h1` runs a schedule of schedir,
and `--titan 1F1B` one of torchtitan. It needs torchtitan 0.3.0 and its folder tests/assets in the
current folder, with the tokenizer and the texts of c4_test. CI does not run it.

torchtitan 0.3.0 is for GPUs and torch 2.14. So the trainer gets another device and an attention
that runs on CPUs, and torch 2.13's own schedules take microbatches.
"""

from __future__ import annotations

import argparse
import logging
import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from schedir.torch_pipelining import patch_torchtitan


def load(module: str) -> Any:
    """Import a module whose names are replaced."""
    return import_module(module)


theirs = load("torch.distributed.pipelining.schedules")


class CpuModule:
    """The functions of `torch.cuda` that the trainer calls, for a CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, None) or (lambda *_, **__: 0)

    def get_device_name(self, *_: Any) -> str:
        return "cpu"

    def get_device_properties(self, *_: Any) -> Any:
        return SimpleNamespace(total_memory=2**30)

    def memory_stats(self, *_: Any) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return 0


def use_cpu() -> None:
    """Replace the device, the attention, and a function that torch 2.13 does not have."""
    utils = load("torchtitan.tools.utils")
    utils.device_type, utils.device_module = "cpu", CpuModule()
    utils.get_local_device = lambda: torch.device("cpu")
    attention = load("torchtitan.models.common.attention").ScaledDotProductAttention
    load("torchtitan.models.llama3").get_attention_config = lambda _: attention.Config()
    load("torchtitan.distributed.utils").set_pg_timeouts = lambda **_: None


def take_microbatches(kind: Any) -> None:
    """Let a schedule of torch 2.13 take `arg_mbs`, `kwarg_mbs` and `target_mbs`."""
    step, split_tensor = kind.step, theirs._split_tensor

    def with_microbatches(
        self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, **more: Any
    ) -> Any:
        inputs = arg_mbs or [()] * len(kwarg_mbs), kwarg_mbs
        self._split_inputs = lambda *_: inputs
        theirs._split_tensor = lambda *_: target_mbs
        try:
            target = None if target_mbs is None else torch.zeros(1)
            return step(self, target=target, **more)
        finally:
            theirs._split_tensor = split_tensor

    kind.step = with_microbatches


def make_config(args: argparse.Namespace) -> Any:
    """Return the configuration of torchtitan's debug model."""
    checkpointing = load("torchtitan.distributed.activation_checkpoint")
    loss = load("torchtitan.components.loss")
    config = load("torchtitan.models.llama3.config_registry").llama3_debugmodel()
    training, parallelism = config.training, config.parallelism
    training.seq_len, training.steps, training.local_batch_size = 32, args.steps, 4
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    parallelism.pipeline_parallel_degree = 2
    parallelism.data_parallel_shard_degree = 1
    parallelism.pipeline_parallel_schedule = args.titan
    config.activation_checkpoint = {
        "none": None,
        "selective": checkpointing.SelectiveAC.Config(),
        "full": checkpointing.FullAC.Config(),
    }[args.checkpoints]
    if args.loss == "plain":
        config.loss = loss.CrossEntropyLoss.Config(global_vocab_size=2048)
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed, config.debug.enable_structured_logging = 1, False
    profiler = config.profiler
    profiler.enable_profiling, profiler.profile_freq, profiler.profiler_warmup = args.profile, 3, 1
    return config


def main() -> None:
    """Train, and print losses, norms, and the parameters that had no gradient."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--titan", default="1F1B", help="torchtitan's name of a schedule")
    parser.add_argument("--schedule", help="a schedule of schedir; by default torchtitan's runs")
    parser.add_argument("--runtime", default="torch", choices=["torch", "schedir"])
    parser.add_argument("--checkpoints", default="selective", choices=["none", "selective", "full"])
    parser.add_argument("--loss", default="chunked", choices=["chunked", "plain"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    use_cpu()
    logging.disable(logging.WARNING)
    if args.schedule:
        patch_torchtitan(args.schedule, runtime=args.runtime)
    else:
        for kind in (theirs.PipelineScheduleSingle, theirs.PipelineScheduleMulti):
            take_microbatches(kind)
    trainer = make_config(args).build()
    losses, norms, missing = list[float](), list[float](), set[str]()
    utils = load("torchtitan.distributed.utils")
    run, clip = trainer.forward_backward_step, utils.clip_grad_norm_

    def run_step(**given: Any) -> Any:
        loss = run(**given)
        losses.append(float(loss))
        missing.update(
            name
            for part in trainer.model_parts
            for name, p in part.named_parameters()
            if p.grad is None
        )
        return loss

    def clip_grad_norm(*given: Any, **more: Any) -> Any:
        norm = clip(*given, **more)
        norms.append(float(norm))
        return norm

    trainer.forward_backward_step, utils.clip_grad_norm_ = run_step, clip_grad_norm
    trainer.train()
    rank = os.environ["RANK"]
    print(f"rank {rank}: losses {losses}, norms {norms}, no gradient {sorted(missing)}", flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
