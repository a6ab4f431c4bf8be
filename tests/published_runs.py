"""Published runs to compare the planner with, each with its model, plan and measured seconds."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from schedir.planner import ParallelPlan, TransformerSpec, load_model
from schedir.predict.layer_activation_bytes import Recompute

GOLDEN = Path(__file__).parent / "golden"
VOCAB = 51200  # GPT-2's, padded as in Megatron-LM for t = 8 (SC21, section 5)
ZB_LAYERS = {"1.5B": 22, "6.2B": 30, "14.6B": 46, "28.3B": 62}  # arXiv 2401.10241, Table 3
ZB_MICROBATCH = {"1.5B": 6, "6.2B": 3, "14.6B": 1, "28.3B": 1}


class Run(NamedTuple):
    """A row of a table: the run, and the seconds of a step."""

    name: str
    model: TransformerSpec
    choice: ParallelPlan
    seconds: float


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a file, by the names of their columns."""
    with (GOLDEN / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


class MicrobatchTimes(NamedTuple):
    """Seconds of a microbatch on one GPU: F and B of a layer, or F, I and W of a stage."""

    name: str
    model: TransformerSpec
    choice: ParallelPlan
    layers: int
    seconds: tuple[float, ...]


def read_layer_times() -> list[MicrobatchTimes]:
    """Return the times of a layer of the 22-billion model from arXiv 2205.05198, Table 4."""
    model = TransformerSpec(48, 6144, 64, vocab=VOCAB, sequence=2048)
    how: dict[str, tuple[Recompute, bool]] = {
        "Baseline no recompute": ("none", False),
        "Sequence Parallelism": ("none", True),
        "Baseline with recompute": ("full", False),
        "Selective Recompute": ("selective", False),
        "Selective + Sequence": ("selective", True),
    }
    found = []
    for row in read_table("rar_table4_layer_times"):
        again, cut = how[row["experiment"]]
        choice = ParallelPlan(tp=8, microbatch_size=4, recompute=again, sequence_parallel=cut)
        seconds = tuple(float(row[f"{name}_ms"]) / 1e3 for name in ("forward", "backward"))
        found.append(MicrobatchTimes(row["experiment"], model, choice, 1, seconds))
    return found


def read_stage_times() -> list[MicrobatchTimes]:
    """Return the times of an inner stage from arXiv 2401.10241, Tables 3 and 9.

    The first and the last stage have one layer less. The paper's B is our I.
    """
    found = []
    for row in read_table("zero_bubble_rates"):
        size, p = row["model"], int(row["p"])
        layers = ZB_LAYERS[size]
        model = TransformerSpec(
            layers, int(row["hidden"]), int(row["heads"]), vocab=VOCAB, sequence=1024
        )
        choice = ParallelPlan(
            pp=p,
            microbatch_size=ZB_MICROBATCH[size],
            microbatches=int(row["m"]),
            schedule="zb_h1",
        )
        seconds = tuple(float(row[f"T_{name}"]) / 1e3 for name in "FIW")
        found.append(MicrobatchTimes(size, model, choice, (layers + 2) // p, seconds))
    return found


def read_one_node_runs() -> list[Run]:
    """Return a tenth of vTrain's rows of one node.

    The table does not name the recomputation. Only full recomputation explains the rows of the
    widest layers and largest microbatches at the speed of an A100.
    """
    runs = []
    for row in read_table("vtrain_one_node_sample"):
        of = {name: int(value) for name, value in row.items() if not name.endswith("(ms)")}
        hidden, heads = of["hidden size"], of["attention heads"]
        model = TransformerSpec(
            of["# layers"], hidden, heads, vocab=VOCAB, sequence=of["sequence length"]
        )
        t, d, p = (of[f"{name} parallelism"] for name in ("tensor", "data", "pipeline"))
        b, batch = of["micro batch"], of["global batch"]
        choice = ParallelPlan(
            pp=p,
            tp=t,
            dp=d,
            microbatch_size=b,
            microbatches=batch // (d * b),
            recompute="full",
            rank_order="tp-dp-pp",
        )
        name = f"h {hidden}, {model.layers} layers"
        runs.append(Run(name, model, choice, float(row["iteration time (ms)"]) / 1e3))
    return runs


def count_operations(model: TransformerSpec, batch: int) -> float:
    """Return the operations of a step by SC21's equation 3, which includes recomputation."""
    layers, s, h, v = model.layers, model.sequence, model.hidden, model.vocab
    return 96.0 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))


def read_weak_scaling_runs() -> list[Run]:
    """Return the runs of SC21 (arXiv 2104.04473), Table 1, with steps from its printed FLOP/s."""
    runs = []
    for row in read_table("sc21_table1_weak_scaling"):
        layers, hidden, heads = (
            int(row[name]) for name in ("layers", "hidden_size", "attention_heads")
        )
        model = TransformerSpec(layers, hidden, heads, vocab=VOCAB, sequence=2048)
        v, batch, gpus = (
            int(row[name]) for name in ("virtual_chunks_v", "global_batch_seqs", "gpus")
        )
        choice = ParallelPlan(
            pp=int(row["pp"]), tp=int(row["tp"]), dp=int(row["dp"]), stages_per_rank=v,
            microbatch_size=int(row["micro_batch_size"]), microbatches=int(row["microbatches_m"]),
            schedule="interleaved" if v > 1 else "one_f_one_b", recompute="full",
            rank_order="tp-dp-pp",
        )  # fmt: skip
        if (choice.batch, choice.gpus) != (batch, gpus):
            raise ValueError(f"{row}: {choice.batch} sequences on {choice.gpus} GPUs")
        seconds = count_operations(model, batch) / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
        runs.append(Run(f"{row['params_billion']}B", model, choice, seconds))
    return runs


def group_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Return groups of at least two runs with the same model, batch and number of GPUs."""
    found: dict[tuple[TransformerSpec, int, int], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.model, run.choice.batch, run.choice.gpus].append(run)
    return [group for group in found.values() if len(group) > 1]


def read_kept_bytes(model: TransformerSpec) -> list[tuple[str, ParallelPlan, float]]:
    """Return the bytes that a layer keeps of one sequence, from arXiv 2205.05198, Table 2."""
    how: dict[str, ParallelPlan] = {
        "no parallelism": ParallelPlan(),
        "tensor parallel (baseline)": ParallelPlan(tp=8),
        "tensor+sequence": ParallelPlan(tp=8, sequence_parallel=True),
        "tensor+selective": ParallelPlan(tp=8, recompute="selective"),
        "tensor+sequence+selective": ParallelPlan(
            tp=8, recompute="selective", sequence_parallel=True
        ),
        "full recomputation": ParallelPlan(recompute="full"),
    }
    found = []
    for row in read_table("rar_table2_activation_memory"):
        choice = how[row["configuration"]]
        s, h, a = model.sequence, model.hidden, model.heads
        of = {"s": s, "b": choice.microbatch_size, "h": h, "a": a, "t": choice.tp}
        found.append((row["configuration"], choice, float(eval(row["formula"], {}, of))))
    return found


class GridRun(NamedTuple):
    """A layout of the grid on H100; `seconds` and `memory` are None if it gave no result.

    `mfu` is a share, as the source counts it, and `memory` bytes.  A layout that is not
    `is_consistent` has another batch than its row says.
    """

    model: TransformerSpec
    choice: ParallelPlan
    nodes: int
    seconds: float | None
    memory: float | None
    mfu: float
    is_consistent: bool


GRID_MODELS = {
    "1B": TransformerSpec(16, 2048, 32, vocab=131072, sequence=4096, ffn=8192, gated=True),
    "3B": TransformerSpec(28, 3072, 32, vocab=131072, sequence=4096, ffn=8192, gated=True),
}


def read_grid_runs() -> list[GridRun]:
    """Return runs of nanotron on 8 to 128 H100.

    A single replica has nothing to shard, so it has ZeRO 0.
    """
    found = []
    for row in read_table("h100_grid_sample"):
        at = {name: int(row[name]) for name in ("nodes", "dp", "pp", "tp", "zero", "microbatches")}
        choice = ParallelPlan(
            pp=at["pp"], tp=at["tp"], dp=at["dp"], microbatch_size=int(row["mbs"]),
            microbatches=at["microbatches"], zero=at["zero"] if at["dp"] > 1 else 0,
            sequence_parallel=at["tp"] > 1, attention="flash", rank_order="tp-dp-pp",
        )  # fmt: skip
        seconds, memory = (float(x) if x else None for x in (row["step_s"], row["gpu_memory_GB"]))
        found.append(
            GridRun(
                GRID_MODELS[row["model"]], choice, at["nodes"], seconds,
                None if memory is None else memory * 1e9,
                float(row["mfu_pct"] or 0) / 100, row["consistent"] == "1",
            )
        )  # fmt: skip
    return found


def read_mlperf_runs() -> list[tuple[str, Run]]:
    """Return accelerators and runs of GPT-3 175B from MLPerf training v4.1, which uses FP8."""
    found = []
    model = TransformerSpec(96, 12288, 96, vocab=VOCAB, sequence=2048)
    for row in read_table("mlperf_gpt3"):
        choice = ParallelPlan(
            pp=int(row["pp"]), tp=int(row["tp"]), dp=int(row["dp"]),
            stages_per_rank=int(row["vpp"]), microbatch_size=int(row["mbs"]),
            microbatches=int(row["microbatches"]), schedule="interleaved", zero=1,
            sequence_parallel=True, attention="flash", rank_order="tp-dp-pp",
        )  # fmt: skip
        name = f"{row['gpus']} {row['accelerator']}"
        found.append((row["accelerator"].lower(), Run(name, model, choice, float(row["step_s"]))))
    return found


class SpeedupInFp4(NamedTuple):
    """A published speedup of training steps in FP4 over those in another precision.

    The choices are assumptions, because only the first source has a part of its plan. `baseline`
    is "" for 16 bits.
    """

    name: str
    model: TransformerSpec
    choice: ParallelPlan
    baseline: str
    speedup: float


def read_fp4_speedups() -> list[SpeedupInFp4]:
    """Return speedups by NVFP4.

    Sources: build.nvidia.com/station/nvfp4-pretraining (Megatron-Bridge on a GB300: 9.05 s and
    5.39 s), and NVIDIA's technical blog, "Train Models Faster with JAX and MaxText Using NVFP4 on
    NVIDIA Blackwell" (MaxText on GB200, with FP4 only in feed-forward networks).
    """
    small, large = load_model("llama-3-8b"), load_model("llama-3-405b")
    station = ParallelPlan(microbatch_size=4, microbatches=16, attention="flash")
    node = ParallelPlan(dp=72, microbatch_size=2, microbatches=8, attention="flash", zero=1)
    rack = ParallelPlan(
        tp=8, pp=9, microbatches=64, attention="flash", sequence_parallel=True, zero=1
    )
    return [
        SpeedupInFp4(
            "Llama 3.1 8B, Megatron-Bridge", replace(small, sequence=4096), station, "", 1.68
        ),
        SpeedupInFp4("Llama 3 8B, MaxText", small, node, "fp8", 1.35),
        SpeedupInFp4("Llama 3.1 405B, MaxText", large, rack, "fp8", 1.44),
    ]


def read_b200_runs() -> list[tuple[TransformerSpec, ParallelPlan, float, float]]:
    """Return runs of Megatron-LM on 8 B200: model, plan, bytes and seconds.

    The plans use Megatron's distributed optimizer.
    """
    found = []
    for row in read_table("b200_memory_sample"):
        at: dict[str, Any] = {
            name: int(row[name]) for name in ("pp", "tp", "dp", "cp", "microbatches")
        }
        model = TransformerSpec(
            int(row["layers"]), 8192, 64, vocab=128256, sequence=int(row["seq"]), ffn=28672,
            kv_heads=8, gated=True, tied=False,
        )  # fmt: skip
        choice = ParallelPlan(
            **at, microbatch_size=int(row["mbs"]), zero=int(at["dp"] * at["cp"] > 1),
            sequence_parallel=at["tp"] > 1, attention="flash", rank_order="tp-dp-pp",
        )  # fmt: skip
        seconds = float(row["real_step_ms"]) / 1e3
        found.append((model, choice, float(row["real_alloc_GiB"]) * 2**30, seconds))
    return found
