"""Tests that other tools read the files of `schedir checkpoint export`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from schedir.__main__ import main
from schedir.checkpoints import dcp_storage
from schedir.checkpoints.checkpoint_directory import CheckpointDirectory, Manifest, TensorMeta
from schedir.checkpoints.local_state import TensorPiece
from schedir.checkpoints.tensor_slices import split_range_into_slices
from schedir.models import gpt
from schedir.training.train import run
from tests.commands import run_command, run_refused_command
from tests.cpu.checkpoint_layouts import read_checkpoint_tensors
from tests.cpu.train_command import CONFIG, ONE_PROCESS

load_file = pytest.importorskip("safetensors.torch").load_file
EXPORT = ("checkpoint", "export")
MODEL = {  # a GPT without layers
    "weights/embedding.weight": torch.ones(5, 4),
    "weights/positions": torch.ones(3, 4),
    "weights/norm.weight": torch.ones(4),
    "weights/norm.bias": torch.ones(4),
}


@pytest.fixture(scope="module", params=["tied in float32", "bfloat16"])
def checkpoint_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the checkpoints of a run of two steps. The model has three heads."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    (folder / "run.toml").write_text(CONFIG.format(text=folder / "text.txt"))
    half = request.param == "bfloat16"
    words = [f'train.checkpoint_dir="{folder / "saved"}"', f'output.dir="{folder / "out"}"',
             "train.steps=2", "train.warmup=0", "train.lr=0.05", "model.layers=2",
             "model.hidden=48", "model.heads=3", "pipeline.schedule=one_f_one_b",
             f"train.precision={'bfloat16' if half else 'float32'}",
             f"model.tied={str(not half).lower()}", "output.record=false"]  # fmt: skip
    assert run(str(folder / "run.toml"), [*ONE_PROCESS, *words]) == 0
    return folder / "saved"


def write_checkpoint(folder: str, step: int, tensors: dict[str, Tensor], **state: object) -> None:
    """Write a checkpoint. Each tensor is stored in several slices if it has enough elements."""
    directory, pieces, metas = CheckpointDirectory(folder), {}, {}
    step_folder = directory.begin(step)
    for name, value in tensors.items():
        metas[name] = TensorMeta(tuple(value.shape), str(value.dtype).removeprefix("torch."))
        middle, flat = value.numel() // 3, value.reshape(-1)
        pieces[name] = [
            TensorPiece(
                box.offset, box.size, flat[low + box.flat_offset :][: box.numel].view(box.size)
            )
            for low, high in ((0, middle), (middle, value.numel()))
            for box in split_range_into_slices(value.shape, low, high)
        ]
    local_tensors = {name: (metas[name], pieces[name]) for name in tensors}
    stored, files = dcp_storage.write(step_folder, 0, local_tensors)
    directory.finish(Manifest(step, files, metas, tuple(stored), {}, state))
    directory.release()


def test_transformers_computes_equal_logits(
    checkpoint_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    target = tmp_path / "model"
    words = ("--to", str(target), "--as", "transformers", "--dtype", "float32")
    assert f"wrote {target}: step 2, " in run_command(
        capsys, *EXPORT, str(checkpoint_folder), *words
    )
    tensors = read_checkpoint_tensors(checkpoint_folder, 2)
    tied = "weights/head.weight" not in tensors
    config = gpt.GPTConfig(vocab=256, layers=2, hidden=48, heads=3, context=16, tied=tied)
    stage = gpt.build_stage(config, 0, 1)
    for name, parameter in stage.named_parameters():
        value = tensors.get(f"main/{name}", tensors[f"weights/{name}"])
        parameter.data.copy_(value)
    exported_model, report = transformers.AutoModelForCausalLM.from_pretrained(
        target, local_files_only=True, output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = stage(tokens), exported_model.eval()(tokens).logits
    assert expected.std() > 0.1  # logits of a trained model are not only noise around 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert exported_model.config.tie_word_embeddings is tied


def test_safetensors_reads_exported_weights(
    checkpoint_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = read_checkpoint_tensors(checkpoint_folder, 2)
    weights = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith("weights/")}
    for dtype in (None, "float32", "bfloat16", "float16"):
        target = tmp_path / f"{dtype}.safetensors"
        words = [] if dtype is None else ["--dtype", dtype]
        run_command(capsys, *EXPORT, str(checkpoint_folder), "--to", str(target), *words)
        exported = load_file(target)
        assert exported.keys() == weights.keys()
        for name, value in weights.items():
            expected = value
            if dtype and getattr(torch, dtype) != value.dtype:
                expected = tensors.get(f"main/{name}", value).to(getattr(torch, dtype))
            assert exported[name].dtype == expected.dtype and exported[name].equal(expected), name
    rounded = [n for n, t in weights.items() if not tensors.get(f"main/{n}", t).equal(t.float())]
    assert bool(rounded) is (weights["norm.weight"].dtype == torch.bfloat16)


def test_all_shapes_and_dtypes_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Odd sizes come first, so later tensors are aligned only if the export aligns them."""
    monkeypatch.chdir(tmp_path)
    tensors = {
        "buffers/mask": torch.tensor([True, False, True]),
        "weights/none": torch.zeros(0, 3),
        "weights/one": torch.tensor(2.5, dtype=torch.bfloat16),
        "buffers/count": torch.tensor(7),
        "weights/cube": torch.arange(60, dtype=torch.float64).view(3, 4, 5),
        "optimizer/cube/step": torch.tensor(1.0),
    }
    write_checkpoint("run", 1, tensors, also={"head": "cube"})
    assert run_command(capsys, *EXPORT, "run", "--to", "a.safetensors").startswith(
        "wrote a.safetensors: step 1, 5 tensors of bfloat16, bool, float32, float64 and int64, "
    )
    exported = load_file("a.safetensors")
    expected = {n[n.index("/") + 1 :]: t for n, t in tensors.items() if "optimizer" not in n}
    assert exported.keys() == expected.keys()
    assert all(exported[n].equal(t) and exported[n].dtype == t.dtype for n, t in expected.items())
    data = Path("a.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    metadata = {"format": "pt", "step": "1", "head": "cube"}
    assert size % 8 == 0 and header.pop("__metadata__") == metadata
    for name, entry in header.items():
        assert entry["data_offsets"][0] % expected[name].element_size() == 0
    assert run_command(capsys, *EXPORT, "run", "--to", "b.safetensors", "--dtype", "float32")
    exported = load_file("b.safetensors")
    assert exported["cube"].dtype == torch.float32 and exported["count"].equal(torch.tensor(7))


def test_refused_export_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    heads = {"settings": {"model.heads": "3", "model.dropout": "0.0"}}
    windowed = {"settings": {"model.heads": "2", "model.dropout": "0.0", "model.window": "(0, 2)"}}
    large = {"weights/w": torch.tensor([1.0, 1e6, float("inf")])}
    write_checkpoint("large", 1, large)
    write_checkpoint("unsaid", 1, MODEL)
    write_checkpoint("odd", 1, MODEL, extra=heads)
    write_checkpoint("wider", 1, MODEL | {"weights/norm.bias": torch.ones(5)}, extra=heads)
    write_checkpoint("more", 1, MODEL | {"buffers/mask": torch.ones(3)}, extra=heads)
    write_checkpoint("other", 1, large, extra=heads)
    write_checkpoint("windowed", 1, MODEL, extra=windowed)
    write_checkpoint("complex", 1, {"weights/w": torch.ones(3, dtype=torch.complex64)})
    write_checkpoint("nothing", 1, {"optimizer/w/step": torch.ones(())})
    write_checkpoint("two", 1, {"weights/w": torch.ones(3), "buffers/w": torch.ones(3)})
    for step in (2, 4):
        write_checkpoint("damaged", step, large)
        (Path("damaged") / f"step-0000000{step}" / "__0_0.distcp").write_bytes(b"?")
    Path("here.safetensors").write_text("mine")
    Path("folder").mkdir()
    Path("folder/config.json").write_text("mine")
    paths_before = sorted(Path().rglob("*"))
    errors, as_gpt = [], "--to hf --as transformers"
    for words in (
        "nowhere --to a.safetensors", "large --to a.safetensors --step 3", "large --to a.bin",
        "large --to here.safetensors", f"odd {as_gpt.replace('hf', 'folder')}",
        "large --to a.safetensors --dtype float16", "large --to a.safetensors --dtype int8",
        "large --to a.safetensors --as onnx", "large --to no/where.safetensors",
        "damaged --to a.safetensors", "damaged --to a.safetensors --step 2",
        "complex --to a.safetensors", "nothing --to a.safetensors", "two --to a.safetensors",
        f"unsaid {as_gpt}", f"odd {as_gpt}", f"wider {as_gpt}", f"more {as_gpt}", f"other {as_gpt}",
        f"windowed {as_gpt}",
    ):  # fmt: skip
        errors.append(f"{words}\n{run_refused_command(capsys, *EXPORT, *words.split())}")
    golden = Path(__file__).parents[1] / "golden" / "checkpoint_export.txt"
    if "UPDATE_GOLDEN" in os.environ:
        golden.write_text("\n".join(errors))
    assert "\n".join(errors) == golden.read_text()
    assert (
        sorted(Path().rglob("*")) == paths_before and Path("here.safetensors").read_text() == "mine"
    )


def test_replace_option_replaces_only_after_complete_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    value = torch.arange(6.0).view(2, 3)
    write_checkpoint("run", 1, {"weights/w": value})
    write_checkpoint("run", 2, {"weights/w": value})
    (Path("run") / "step-00000002" / "__0_0.distcp").write_bytes(b"?")
    Path("a.safetensors").write_text("mine")
    words = (*EXPORT, "run", "--to", "a.safetensors", "--replace")
    settings = {"model.heads": "2", "model.dropout": "0.0"}
    write_checkpoint("gpt", 1, MODEL, extra={"settings": settings})
    with monkeypatch.context() as patch:
        patch.setattr(dcp_storage, "read", _fail_to_read)
        assert main(words) == 2
        assert "cannot read weights/w of step 1: OSError: gone" in capsys.readouterr().err
        assert main((*EXPORT, "gpt", "--to", "model", "--as", "transformers")) == 2
    assert Path("a.safetensors").read_text() == "mine" and not Path("model").exists()
    capsys.readouterr()
    out = run_command(capsys, *words)
    assert out.startswith("skipped: step-00000002 is not complete: ")
    assert load_file("a.safetensors")["w"].equal(value)
    assert sorted(p.name for p in Path().iterdir()) == ["a.safetensors", "gpt", "run"]


def _fail_to_read(*arguments: object) -> None:
    raise OSError("gone")
