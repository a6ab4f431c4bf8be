"""Tests that processes compare all their settings before any other communication."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from schedir.errors import ExecutionError, ModelError
from schedir.training.batches.samples import Batches
from schedir.training.config.run_config import Config, OutputConfig, PipelineConfig
from schedir.training.processes.rendezvous_store import connect_store
from schedir.training.processes.startup_consistency import collect_config_facts, compare_facts
from schedir.transports.json_collectives import encode_value
from tests.cpu.train_command import (
    ONE_STAGE_PER_RANK,
    find_free_port,
    fork_processes,
    make_arguments,
    run_launched,
    write_schedule,
)


def compare_processes(
    processes: list[tuple[int, int, dict[str, str]]], timeout: float = 20
) -> list[str]:
    """Return the errors of processes with these (RANK, WORLD_SIZE, facts) and a common store.

    Each process is a thread.
    """
    store, errors = HashStore(), [""] * len(processes)

    def compare(k: int) -> None:
        rank, world, facts = processes[k]
        try:
            compare_facts(store, rank, world, facts | {"WORLD_SIZE": str(world)}, timeout)
        except (ModelError, ExecutionError) as error:
            errors[k] = error.fact

    threads = [Thread(target=compare, args=(k,)) for k in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_equal_facts_are_accepted() -> None:
    assert compare_processes([(k, 4, {"a": "1"}) for k in range(4)]) == [""] * 4


@pytest.mark.parametrize(
    ("processes", "fact"),
    [
        ([(0, 2, {"a": "1"}), (1, 2, {"a": "2"})], "not agree on a: 1 and 2"),
        ([(0, 3, {}), (1, 2, {}), (2, 3, {})], "not agree on WORLD_SIZE: 3 and 2"),
        # This is found before the wait for the third process, which never comes.
        ([(0, 3, {}), (1, 2, {})], "processes 0 and 1 do not agree on WORLD_SIZE: 3 and 2"),
        ([(0, 3, {}), (1, 3, {}), (1, 3, {})], "two processes have RANK 1"),
        ([(0, 2, {}), (0, 2, {})], "two processes have RANK 0"),
    ],
)
def test_difference_is_reported_on_every_process(processes: Any, fact: str) -> None:
    errors = compare_processes(processes)
    assert all(fact in error for error in errors), errors


def test_missing_process_is_named() -> None:
    first_error, _ = compare_processes([(0, 3, {}), (1, 3, {})], timeout=0.5)
    assert first_error == "process 2 did not connect in time"
    # Process 0 compares. It is missing, so the difference of the others is not reported.
    errors = compare_processes([(1, 3, {}), (2, 2, {})], timeout=0.5)
    assert errors == ["process 0 did not connect in time"] * 2


def test_pickle_from_peer_is_refused() -> None:
    store: Any = HashStore()
    store.set("facts 1", b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ModelError, match="process 1 sent data that schedir cannot decode"):
        compare_facts(store, 0, 2, {}, 5)


@pytest.mark.parametrize(
    "facts", [5, ({"a": 1}, None), ({1: "a"}, None), ({}, ([],)), ({}, "a"), ({},)]
)
def test_malformed_facts_are_refused(facts: object) -> None:
    store: Any = HashStore()
    store.set("facts 1", encode_value(facts))
    with pytest.raises(ModelError, match="process 1 sent invalid facts"):
        compare_facts(store, 0, 2, {"a": "1"}, 5)
    assert store.get("verdict").startswith(b"process 1 sent invalid facts")


def test_every_configuration_section_is_compared() -> None:
    base = Config()
    shared = replace(base, pipeline=PipelineConfig(buffer_sharing="minimal"))
    for other, name in (
        (replace(base, output=OutputConfig(record=False)), "output.record"),
        (shared, "pipeline.buffer_sharing"),
    ):
        one, two = collect_config_facts(base), collect_config_facts(other)
        assert {fact for fact in one if one[fact] != two[fact]} == {name}
    sections = {
        name.partition(".")[0] for name in collect_config_facts(base) if not name.startswith("the ")
    }
    assert sections == {"model", "pipeline", "memory", "data", "train", "output"}
    assert {"the version of schedir", "the version of torch", "the version of Python"} <= {*one}


def test_data_digest_covers_all_tokens() -> None:
    data = np.random.default_rng(1).integers(0, 255, 300_000).astype("u1")
    description = Batches(data, 8, 1).description
    assert description.startswith("300000 tokens of uint8")
    assert description == Batches(data.copy(), 8, 1).description
    for position in (0, 150_000, 299_999):
        other = data.copy()
        other[position] ^= 1
        assert Batches(other, 8, 1).description != description
    assert Batches(data[:-1], 8, 1).description != description


@pytest.mark.parametrize("listens", [False, True])
def test_unreachable_store_is_reported_after_timeout(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        if not listens:
            silent.close()
        with pytest.raises(ExecutionError) as error:
            connect_store(0.5)
    assert error.value.fact == f"the rendezvous store at 127.0.0.1:{port} does not answer"


# ---------------------------------------------------------------- runs


def start_processes(config: str, folder: Path, sets: list[list[str]]) -> list[tuple[int, str]]:
    """Start one process for each list of settings, and return exit codes and errors."""
    commands = [make_arguments(config, folder, "pipeline.tp=1", *settings) for settings in sets]
    return [(code, err) for code, _, err in fork_processes(commands, folder, find_free_port())]


def test_different_data_of_processes_are_refused(config: str, tmp_path: Path) -> None:
    results = start_processes(
        config, tmp_path / "out", [["data.source=README.md"], ["data.source=LICENSE"]]
    )
    assert [code for code, _ in results] == [2, 2], results
    errors = "".join(err for _, err in results)  # only the first process to fail reports
    assert errors.count("processes 0 and 1 do not agree on the data: ") == 1, errors
    assert "Traceback" not in errors and ".cpp" not in errors and errors.count("\n") == 1
    assert not (tmp_path / "out" / "loss.csv").exists()


def test_duplicate_local_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    fact = "processes 0 and 1 of one machine both have LOCAL_RANK 0"
    assert compare_processes([(0, 2, {}), (1, 2, {})]) == [fact] * 2


OTHER_VERSION = """
import os

import schedir
from schedir import schedules

mine = schedules.one_f_one_b
if os.environ.get("RANK") == "1":
    schedir.__version__ = "0.0.9"
"""


def test_different_schedir_versions_are_refused(config: str, tmp_path: Path) -> None:
    sets = [*ONE_STAGE_PER_RANK, write_schedule(tmp_path, OTHER_VERSION)]
    command = make_arguments(config, tmp_path / "out", *sets)
    code, _, err = run_launched(command, tmp_path / "out")
    assert code == 2, err
    assert err.count("do not agree on the version of schedir: 0.1.0 and 0.0.9") == 1, err
    assert not (tmp_path / "out" / "loss.csv").exists()


SAMPLED = """
import schedir.training.batches.samples
from schedir import schedules

mine = schedules.one_f_one_b
schedir.training.batches.samples._MAX_DIGEST_BLOCKS = 1
"""


def test_difference_in_unsampled_data_is_refused(config: str, tmp_path: Path) -> None:
    schedule, rng = write_schedule(tmp_path, SAMPLED), np.random.default_rng(2)
    first, settings_by_process = rng.integers(0, 255, 2**16).astype("u1"), []
    for name in ("one", "other"):
        rest = rng.integers(0, 255, 200_000).astype("u1")
        (tmp_path / name).write_bytes(first.tobytes() + rest.tobytes())
        settings_by_process.append(
            [f'data.source="{tmp_path / name}"', schedule, "pipeline.stages_per_rank=1",
             "train.log_every=2", "train.steps=4"]
        )  # fmt: skip
    results = start_processes(config, tmp_path / "out", settings_by_process)
    assert [code for code, _ in results] == [2, 2], results
    errors = "".join(err for _, err in results)
    assert errors.count("processes 0 and 1 do not agree on the data read up to step 2: crc32") == 1
    assert "Traceback" not in errors and ".cpp" not in errors, errors
    assert (tmp_path / "out" / "loss.csv").read_text().count("\n") == 1  # no step was reported
