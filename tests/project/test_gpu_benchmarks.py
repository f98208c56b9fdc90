"""The commands that measure on a GPU run before there is one: dry runs on the CPU, and stand-ins for what only CUDA answers."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import warnings
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import typer

from processes import DEADLINE_SECONDS
from tiers import nightly

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="looks at a checkout, which is not here")


def script(name: str) -> Any:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))  # as when it is started
    return importlib.import_module(name)


@pytest.mark.slow
def test_what_scripts_ask_of_cuda_exists() -> None:
    """Each name of `torch.cuda` and `torch.profiler` in them: a mistake there would show on the GPU only."""
    names = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("torch.cuda.", "torch.profiler.")):
                names.add(ast.unparse(node))

    assert "torch.cuda.set_sync_debug_mode" in names
    for name in names:
        reduce(getattr, name.split(".")[1:], torch)


def test_what_is_asked_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins that take the arguments of torch's functions and no others; on the CPU none of them is called."""
    card, calls = script("card"), []
    for name, answer in {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 3 * 2**30,
        "is_available": True,
        "get_device_name": "NVIDIA H200",
    }.items():
        stand_in = create_autospec(getattr(torch.cuda, name), return_value=answer)
        stand_in.side_effect = lambda *_, name=name, answer=answer: (calls.append(name), answer)[1]
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi

    assert card.now("cpu") <= card.now("cuda")
    card.free_cached("cuda")
    card.forget_peak("cuda")
    assert (card.peak_gib("cuda"), card.peak_flop_per_second()) == (3.0, 989e12)
    assert calls == [
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "max_memory_allocated",
        "is_available",
        "get_device_name",
    ]
    assert card.card() == f"NVIDIA H200, driver unknown, CUDA {torch.version.cuda}"


def test_the_version_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That of the first card."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '580.159.04\\n580.159.04\\n'\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    assert script("card").driver_version() == "580.159.04"


def test_waits_are_counted_as_cuda_warns_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the same one twice, though the caller ignores warnings; not what the mode says of itself, and not other warnings."""
    modes: list[Any] = []

    def set_mode(debug_mode: int | str) -> None:
        modes.append(debug_mode)
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=1,
        )

    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", create_autospec(torch.cuda.set_sync_debug_mode, side_effect=set_mode)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = script("card").WaitWarnings("cuda")
        counted.start()
        for _ in range(2):
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:150.)", stacklevel=1
            )
        warnings.warn("something else", stacklevel=1)

        assert counted.stop() == 2
        assert modes == ["warn", "default"]
        warnings.warn("is ignored again", stacklevel=1)


def test_sections_that_were_not_measured_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that has the file, and in one that has none where the published file has them; in the order of the parts."""
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "HERE", tmp_path / "published")
    gpu.write(gpu.HERE, {"Saving": "## Saving\n\nold\n", "Tiny models": "## Tiny models\n\nold\n"})
    gpu.write(tmp_path / "into", {"Saving": "## Saving\n\nnew\n"})
    gpu.write(tmp_path / "into", {"Training at GPT-2's size": "## Training at GPT-2's size\n\nnew\n"})
    text = (tmp_path / "into" / gpu.FILE).read_text(encoding="utf-8")

    assert [line for line in text.splitlines() if line in ("old", "new") or line.startswith("## ")] == [
        "## Training at GPT-2's size", "new", "## Tiny models", "old", "## Saving", "new"
    ]  # fmt: skip
    assert not list(tmp_path.rglob("*.new"))


def test_figures_from_elsewhere_are_taken_but_not_those_of_a_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and the picture go to their places."""
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "HERE", tmp_path / "published")
    monkeypatch.setattr(gpu, "PICTURES", tmp_path / "pictures")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / gpu.PICTURE).write_bytes(b"a picture")
    with pytest.raises(typer.BadParameter, match="figures of a GPU"):
        gpu.take(tmp_path / "there")
    gpu.write(tmp_path / "there", {"Saving": f"## Saving\n\n{gpu.DRY_RUN}\n"})
    with pytest.raises(typer.BadParameter, match="figures of a GPU"):
        gpu.take(tmp_path / "there")
    gpu.write(tmp_path / "there", {"Saving": "## Saving\n\nfigures\n"})
    gpu.take(tmp_path / "there")

    assert "figures" in (gpu.HERE / gpu.FILE).read_text(encoding="utf-8")
    assert (gpu.PICTURES / gpu.PICTURE).read_bytes() == b"a picture"


@pytest.mark.slow
def test_a_part_that_does_not_end_leaves_what_it_has_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended after its share of the time, and the section says so."""
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(gpu, "SLACK", 0.0)
    (tmp_path / "endless.py").write_text("import time\nprint('a first table')\ntime.sleep(600)\n", encoding="utf-8")

    assert not gpu.run(gpu.Part("endless.py", "Saving", (), (), 1.0), tmp_path / "into", 0.05, dry_run=True)
    text = (tmp_path / "into" / gpu.FILE).read_text(encoding="utf-8")
    assert "a first table" in text
    assert "ended with status -9" in text


def refused(connection: Any) -> None:
    connection.recv()
    raise ValueError("no | such\nthing")


def echo(connection: Any) -> None:
    while (message := connection.recv()) is not None:
        connection.send(message)
    sys.exit(3)


@pytest.mark.nightly
def test_what_fails_in_its_own_process_is_told() -> None:
    """What was raised, in a line for a table; that the process died; that it did not answer."""
    own_process = script("own_process")
    with (
        own_process.OwnProcess(refused) as raising,
        own_process.OwnProcess(echo) as dying,
        own_process.OwnProcess(echo) as silent,
    ):
        raising.send(1)
        with pytest.raises(own_process.ProcessFailedError, match=r"^ValueError: no / such$"):
            raising.receive(DEADLINE_SECONDS)
        dying.send("hello")
        assert dying.receive(DEADLINE_SECONDS) == "hello"
        dying.send(None)
        with pytest.raises(own_process.ProcessFailedError, match="ended with status 3"):
            dying.receive(DEADLINE_SECONDS)
        with pytest.raises(own_process.ProcessFailedError, match="did not answer"):
            silent.receive(0.1)
        with pytest.raises(own_process.ProcessFailedError, match="ended with status -9"):
            silent.receive(DEADLINE_SECONDS)


def run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=840, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def rows(text: str, name: str) -> list[str]:
    """The lines of tables that begin with a name."""
    return [line for line in text.splitlines() if line.startswith(f"| {name} |")]


@pytest.mark.parametrize(
    "part", [nightly("update"), nightly("tiny"), nightly("optimizer"), nightly("saving"), nightly("trace")]
)
def test_the_dry_run_of_a_part(part: str, tmp_path: Path) -> None:
    """It runs to its end, and the section has figures of this library."""
    run("benchmarks/gpu.py", "--dry-run", "--part", part, "--into", str(tmp_path), "--minutes", "12")
    gpu = script("gpu")
    text = (tmp_path / gpu.FILE).read_text(encoding="utf-8").partition(f"## {gpu.PARTS[part].heading}\n")[2]
    ours = {
        "update": ["by hand", "ignite_train", 'ignite_train, compile="update"'],
        "tiny": ["by hand", "ignite_train", 'ignite_train, compile="update"'],
        "optimizer": ["ignite_train, fused AdamW"],
        "saving": ["Checkpoint", "DCP async_save"],
        "trace": ["by hand", "ignite_train", 'ignite_train, compile="update"'],
    }[part]

    for name in ours:
        assert rows(text, name), text
        assert not [row for row in rows(text, name) if "failed" in row or "left out" in row or "not the same" in row]
    assert (tmp_path / gpu.PICTURE).exists() == (part == "trace")
    assert len(list(tmp_path.glob("trace_*.json.gz"))) == (2 if part == "trace" else 0)


@pytest.mark.parametrize(
    ("compiled", "only", "names"),
    [
        nightly("without", "gnite", ["ignite_train", "Ignite `create_supervised_trainer`"]),
        nightly("with", "update", ['ignite_train, compile="update"']),
    ],
    ids=["not compiled", "compiled"],
)
def test_the_dry_run_at_the_size_of_gpt2(compiled: str, only: str, names: list[str]) -> None:
    """Loops take turns, each in its process, for several numbers of micro-batches, with the same work."""
    options = ["--compiled", compiled, "--only", only, "--accumulation", "1", "--accumulation", "2", "--minutes", "12"]
    text = run("benchmarks/gpu_speed.py", "--dry-run", *options)

    for name in ["by hand", *names]:
        assert len(rows(text, name)) == 2, text
        assert not [row for row in rows(text, name) if "failed" in row or "not the same" in row]


@pytest.mark.nightly
def test_a_loop_that_is_missing_has_its_reason_in_its_row() -> None:
    """The others are measured, and so they are for the next number of micro-batches."""
    turns, training = script("turns"), script("gpt2").Training
    tasks = [training(1, 64, 8, 1, 16, "cpu", steps) for steps in (1, 2)]
    by_hand = turns.Entry(script("contestants").by_hand)
    contest = turns.Contest({"by hand": by_hand, "missing": turns.Entry(missing)}, tasks, at_once=2, tolerance=0.1)
    results = [result for _, result in contest.results(turn_seconds=0.01, repetitions=2, until=float("inf"))]

    assert [result.failed for result in results] == [{"missing": "ModuleNotFoundError: No module named 'missing'"}] * 2
    assert [len(result.rounds.pairs["by hand"]) for result in results] == [2, 2]
    assert results[0].row("missing", list, 4) == ["missing", "failed: ModuleNotFoundError: No module named 'missing'", "", ""]


@pytest.mark.nightly
def test_without_the_loop_by_hand_nothing_is_compared() -> None:
    """It says so in each row, and the next task begins all the same."""
    turns, training = script("turns"), script("gpt2").Training
    tasks = [training(1, 64, 8, 1, 16, "cpu", steps) for steps in (1, 2)]
    loop = turns.Entry(script("contestants").by_hand)
    contest = turns.Contest({"by hand": turns.Entry(missing), "other": loop}, tasks, at_once=2, tolerance=0.1)
    results = [result for _, result in contest.results(turn_seconds=0.01, repetitions=2, until=float("inf"))]

    reason = {"by hand": "ModuleNotFoundError: No module named 'missing'", "other": "no loop to compare with"}
    assert [result.failed for result in results] == [reason] * 2


def missing(work: Any) -> Any:
    raise ModuleNotFoundError("No module named 'missing'")
