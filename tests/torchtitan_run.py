"""Run torchtitan's own trainer on CPUs, with its own schedules and with schedules of schedir.

`python -m tests.torchtitan_run` needs torchtitan 0.3.0. `make versions` runs it in an environment
of its own. It trains torchtitan's `llama3_debugmodel`, and compares the losses and the gradient
norms of each run with those of torchtitan's own schedule. It also imports the trace of a step.

torchtitan 0.3.0 is made for GPUs. So the trainer gets another device, and an attention that runs
on CPUs. Schedules of torch 2.13 take whole batches, and are wrapped so that they take microbatches.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from inspect import signature
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import schedir
from schedir.torch_pipelining import patch_torchtitan
from schedir.traces.trace_import import read_run
from schedir.transports.local_processes import RankError, run_processes

MICROBATCHES, LENGTH, VOCABULARY, TIMEOUT, CONNECT_ATTEMPTS = 4, 32, 2048, 1800, 3


@dataclass(frozen=True)
class Case:
    """A run of torchtitan's trainer.

    `name` is torchtitan's name of a schedule. torchtitan runs that schedule if `schedule` is "".
    `pp` and `shards` are the sizes of the pipeline and of FSDP.
    """

    name: str
    pp: int = 2
    shards: int = 1
    schedule: str = ""
    runtime: str = "torch"
    checkpoints: str = "selective"
    loss: str = "chunked"
    is_profiled: bool = False

    def __str__(self) -> str:
        chosen = (
            f"{self.schedule}, {self.runtime}" if self.schedule else f"torchtitan's {self.name}"
        )
        return f"pp {self.pp}, FSDP {self.shards}, {chosen}"


class Steps(NamedTuple):
    """The losses and norms of a rank, and the names of its parameters without a gradient."""

    losses: list[float]
    norms: list[float]
    missing: list[str]


def list_runs() -> list[tuple[Case, list[Case]]]:
    """Return runs of torchtitan's own schedules, each with the runs to compare with it."""
    both = ("torch", "schedir")
    runs = []
    for base in (Case("1F1B", shards=2), Case("1F1B", pp=4)):
        runs.append((base, [
            replace(base, schedule=name, runtime=runtime)
            for name in ("one_f_one_b", "zb_h1") for runtime in both
        ]))  # fmt: skip
    for base in (Case("Interleaved1F1B", shards=2), Case("Interleaved1F1B", pp=4)):
        own = [replace(base, schedule="interleaved", runtime=runtime) for runtime in both]
        runs.append((base, own))
    # torchtitan's ZBV fails with checkpoints, and loses a gradient with the chunked loss.
    vee = Case("ZBVZeroBubble", checkpoints="none", loss="plain")
    own = [Case("ZBVZeroBubble", schedule="zb_v", runtime=runtime) for runtime in both]
    return [*runs, (vee, own)]


# ---------------------------------------------------------------- torchtitan on a CPU


class CpuModule:
    """The functions of `torch.cuda` that the trainer calls, for a CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, None) or (lambda *_, **__: 0)

    def get_device_name(self, *_: Any) -> str:
        """Return a name of the device."""
        return "cpu"

    def get_device_properties(self, *_: Any) -> Any:
        """Return the memory of the device, which the trainer prints."""
        return SimpleNamespace(total_memory=2**30)

    def memory_stats(self, *_: Any) -> dict[str, int]:
        """Return no statistics."""
        return {}

    def current_device(self) -> int:
        """Return the index of the device."""
        return 0


def load(module: str) -> Any:
    """Import a module to replace some of its attributes."""
    return import_module(module)


def use_cpu() -> None:
    """Replace torchtitan's device and attention, and the barrier that needs a GPU."""
    utils = load("torchtitan.tools.utils")
    utils.device_type, utils.device_module = "cpu", CpuModule()
    utils.get_local_device = lambda: torch.device("cpu")
    attention = load("torchtitan.models.common.attention").ScaledDotProductAttention
    load("torchtitan.models.llama3").get_attention_config = lambda _: attention.Config()
    load("torchtitan.distributed.utils").set_pg_timeouts = lambda **_: None
    load("torchtitan.trainer")


def take_microbatches() -> None:
    """Let the schedules of torch 2.13 take `arg_mbs`, `kwarg_mbs` and `target_mbs`."""
    theirs = load("torch.distributed.pipelining.schedules")
    split_tensor = theirs._split_tensor

    def wrap(step: Any) -> Any:
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

        return with_microbatches

    for kind in (theirs.PipelineScheduleSingle, theirs.PipelineScheduleMulti):
        if "arg_mbs" not in signature(kind.step).parameters:
            kind.step = wrap(kind.step)


def write_assets(folder: Path) -> None:
    """Write a tokenizer and texts to the folders in which torchtitan's debug model expects them."""
    tokenizers = load("tokenizers")
    texts, tokenizer = folder / "tests/assets/c4_test", folder / "tests/assets/tokenizer"
    texts.mkdir(parents=True)
    tokenizer.mkdir(parents=True)
    words = {"<unk>": 0, "<eos>": 1} | {f"w{k}": k + 2 for k in range(VOCABULARY - 2)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tokenizer / "tokenizer.json"))
    config = {"eos_token": "<eos>", "add_bos_token": False, "add_eos_token": False}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [
        {"text": " ".join(f"w{(row * 37 + k * k) % (VOCABULARY - 2)}" for k in range(200))}
        for row in range(64)
    ]
    (texts / "data.json").write_text("\n".join(map(json.dumps, rows)))


def make_config(case: Case, steps: int, folder: Path) -> Any:
    """Return the configuration of torchtitan's debug model for a run."""
    checkpointing = load("torchtitan.distributed.activation_checkpoint")
    config = load("torchtitan.models.llama3.config_registry").llama3_debugmodel()
    config.dump_folder = str(folder)
    training, parallelism = config.training, config.parallelism
    training.seq_len, training.steps, training.local_batch_size = LENGTH, steps, MICROBATCHES
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    parallelism.pipeline_parallel_degree = case.pp
    parallelism.data_parallel_shard_degree = case.shards
    parallelism.pipeline_parallel_schedule = case.name
    if torch.__version__ < "2.14":  # `fully_shard` of torch 2.13 refuses the default backend
        parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = {
        "none": None,
        "selective": checkpointing.SelectiveAC.Config(),
    }[case.checkpoints]
    if case.loss == "plain":
        loss = load("torchtitan.components.loss").CrossEntropyLoss
        config.loss = loss.Config(global_vocab_size=VOCABULARY)
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed, config.debug.enable_structured_logging = 1, False
    profiler = config.profiler
    profiler.enable_profiling = case.is_profiled
    profiler.profile_freq, profiler.profiler_warmup = steps, 1
    return config


def train(rank: int, case: Case, steps: int, folder: Path, port: int) -> Steps:
    """Train for some steps with torchtitan's trainer, which creates its own process groups."""
    dist.destroy_process_group()
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{case.pp * case.shards}",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{port}",
    }
    logging.disable(logging.WARNING)
    if case.schedule:
        patch_torchtitan(case.schedule, runtime=case.runtime)
    else:
        take_microbatches()
    if case.is_profiled:
        schedir.instrument("torch")
    trainer = make_config(case, steps, folder).build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has only sums
    result = Steps([], [], [])
    utils = load("torchtitan.distributed.utils")
    run, clip = trainer.forward_backward_step, utils.clip_grad_norm_

    def run_step(**arguments: Any) -> Any:
        loss = run(**arguments)
        result.losses.append(float(loss.detach()))
        return loss

    def clip_grad_norm(*arguments: Any, **options: Any) -> Any:
        if not result.norms:
            parameters = [pair for part in trainer.model_parts for pair in part.named_parameters()]
            result.missing.extend(name for name, p in parameters if p.grad is None)
        norm = clip(*arguments, **options)
        result.norms.append(float(norm))
        return norm

    trainer.forward_backward_step, utils.clip_grad_norm_ = run_step, clip_grad_norm
    trainer.train()
    return result


# ---------------------------------------------------------------- comparison


def find_free_port() -> int:
    """Return a port that no process uses."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def run_case(case: Case, steps: int, folder: Path) -> list[Steps]:
    """Run a case in forks of this process, which has loaded torchtitan.

    On a busy machine, Gloo sometimes fails to connect the processes. Then they start again.
    """
    forks = get_context("fork")
    attempts = CONNECT_ATTEMPTS
    while True:
        try:
            return run_processes(
                train, case.pp * case.shards, case, steps, folder, find_free_port(),
                context=forks, timeout=TIMEOUT,
            )  # fmt: skip
        except RankError as error:
            attempts -= 1
            if not attempts or "Gloo connectFullMesh failed" not in str(error):
                raise
            print(f"Gloo did not connect: starting {case} again", flush=True)


def compare(
    reference: list[Steps], own: list[Steps], last_ranks: slice, tolerance: float = 1e-6
) -> str:
    """Describe the differences of losses and norms between two runs.

    Raises:
        AssertionError: A difference is larger than the tolerance, or a parameter has no gradient.
    """
    missing = sorted({name for steps in own for name in steps.missing})
    assert not missing, f"no gradient: {missing}"
    words = []
    for name in ("losses", "norms"):
        pairs = [
            pair
            for one, other in zip(reference[last_ranks], own[last_ranks], strict=True)
            for pair in zip(getattr(one, name), getattr(other, name), strict=True)
        ]
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        assert worst <= tolerance, f"{name} differ by {worst:.1e}"
        words.append(f"{name} equal" if worst == 0 else f"{name} differ by {worst:.1e}")
    return ", ".join(words)


def explain_trace(case: Case, steps: int) -> str:
    """Profile a run, import its trace, and describe the imported program."""
    with TemporaryDirectory() as folder:
        run_case(replace(case, is_profiled=True), steps, Path(folder))
        (traces,) = {path.parent for path in Path(folder).rglob("*trace*.json*")}
        timeline = read_run([str(traces)]).timeline
    program = timeline.program
    count = sum(map(len, program.streams))
    schedir.check(program, progress_model="per_edge")
    return f"{count} instructions on {program.shape.ranks} ranks, checked"


def main() -> int:
    """Run all cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="", help="run only groups with this in their text")
    parser.add_argument("--no-traces", action="store_true")
    args = parser.parse_args()
    versions = [f"{name} {metadata.version(name)}" for name in ("torchtitan", "torch")]
    print(f"{', '.join(versions)}, {datetime.date.today()}, {args.steps} steps", flush=True)
    use_cpu()
    has_failed = False
    with TemporaryDirectory() as folder:
        write_assets(Path(folder))
        os.chdir(folder)
        for base, own_cases in list_runs():
            if args.only not in f"{base}":
                continue
            reference = run_case(base, args.steps, Path(folder))
            # torchtitan computes the loss on the last stage: rank 0 of a vee, else the last rank.
            last = slice(0, base.shards) if "ZBV" in base.name else slice(-base.shards, None)
            losses = reference[last][0].losses
            print(f"\n{base}: losses {losses}, norms {reference[last][0].norms}", flush=True)
            for case in own_cases:
                start = time.perf_counter()
                try:
                    own = run_case(case, args.steps, Path(folder))
                    missing = sorted({name for steps in own for name in steps.missing})
                    text = compare(reference, own, last) + (
                        f", no gradient: {missing}" * bool(missing)
                    )
                except Exception as error:
                    text, has_failed = f"FAILED: {str(error)[-2000:]}", True
                print(f"| {case} | {text} | {time.perf_counter() - start:.0f} s", flush=True)
            if not args.no_traces:
                print(f"| trace of {base} | {explain_trace(base, args.steps)} |", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
