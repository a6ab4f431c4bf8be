"""Tests of Hugging Face's GPT-2 in stages: the example, and a comparison with the whole model."""

import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import schedir
from schedir import PipelineShape
from schedir.models.huggingface import cut
from schedir.runtime import make_backward_splittable
from schedir.runtime.boundaries.boundary import Boundary
from schedir.runtime.in_process import InProcessExecutor
from tests.cases import campaign
from tests.cpu.train_command import ROOT, run_in_forks, run_launched, run_script

pytest.importorskip("transformers")
EXAMPLE = ROOT / "examples/gpt2.py"


@campaign
def test_example_on_four_processes_prints_same_losses(tmp_path: Path) -> None:
    code, single_output, err = run_launched([str(EXAMPLE)], tmp_path / "alone")
    assert code == 0, err
    check_losses(single_output, run_script(EXAMPLE, 4, tmp_path / "four"))


def test_main_of_example_on_two_processes_prints_same_losses() -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    main.__globals__.update(MICROBATCHES=4, CONTEXT=16)
    import_module("torch._dynamo")  # Each process would import it for the optimizer.
    check_losses(run_in_forks(main, 1), run_in_forks(main, 2))


def check_losses(single_output: str, output: str) -> None:
    assert single_output == output
    losses = [float(line.split()[-1]) for line in single_output.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        ("one_f_one_b", PipelineShape(4, 6)),
        ("zb_h1", PipelineShape(4, 6)),
        ("zb_v", PipelineShape(2, 6, 2, "vee")),  # the tied weight's copies are on one rank
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_gradients_equal_whole_model(schedule: str, shape: PipelineShape) -> None:
    example: Any = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    config = example["GPT2Config"](
        n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=16,
        bos_token_id=0, eos_token_id=0, use_cache=False,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    model = example["GPT2LMHeadModel"](config).train()
    tokens = torch.randint(64, (6, 2, 17))
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    expected = torch.zeros(())
    for x, target in zip(inputs, targets, strict=True):
        loss = example["summed_loss"](model(x).logits, target) / 10
        loss.backward()
        expected += loss.detach() * 10
    expected_gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    stages: list[Any] = [*cut(model, 4)]
    if schedule.startswith("zb"):
        stages = [make_backward_splittable(stage) for stage in stages]
    ties = schedir.find_tied_weights(stages)
    program = schedir.compile(getattr(schedir.schedules, schedule), shape, tied_weights=ties)
    loss, boundary = example["summed_loss"], Boundary((2, 16, 32))
    ranks = InProcessExecutor(program, stages, loss=loss, boundary=boundary, tied_weights=ties)
    total = ranks.step(inputs, targets, grad_scale=0.1)
    assert torch.allclose(total, expected)
    for name, p in model.named_parameters():
        assert p.grad is not None
        error = (p.grad - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert error < 1e-6, f"{name} is off by {error:.1e}"
