"""A lack of memory that is real: the address space of a process is limited, and torch's allocator cannot get more of it."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ignite_train.update.out_of_memory import memory_summary
from processes import DEADLINE_SECONDS

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")

# The forward of n samples needs n · 128 MiB at once. The limit leaves 384 MiB, so two samples fit and four do not.
SCRIPT = """
import json, resource, sys
from pathlib import Path
import torch
from ignite_train import ForwardOutput, UpdateOptions, create_trainer

torch.set_num_threads(1)


def forward(model, x):
    try:
        wide = x.expand(len(x), 2**24).contiguous()  # 128 MiB a sample, in float64
    except RuntimeError as error:  # this is what torch's allocator of the CPU raises
        raise torch.OutOfMemoryError(str(error)) from error
    return ForwardOutput((model(x) - wide[:, -1:]).square().sum(), len(x), {"samples": len(x)})


def train(policy, sizes):
    model = torch.nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.25), model.bias.fill_(0.5)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), forward, options=UpdateOptions(on_out_of_memory=policy)
    )
    x = torch.arange(8.0, dtype=torch.float64)[:, None]
    trainer.update([*x.split(sizes)])
    output = trainer.state.update_output
    return [model.weight.item(), model.bias.item()], output.num_out_of_memory, output.logs["samples"]


train("raise", [1] * 8)  # what is loaded and allocated once
sizes = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")]
limit = int(sizes[0]) * 1024 + 384 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
found = {"small": train("raise", [1] * 8), "split": train("split", [4, 4]), "skip": train("skip", [1, 4, 1, 2])}
try:
    train("raise", [4, 4])
except torch.OutOfMemoryError as error:
    found["message"], found["notes"] = str(error), error.__notes__
found["limit"] = limit
print(json.dumps(found))
"""


@linux
@pytest.mark.slow
def test_a_process_without_memory(tmp_path: Path) -> None:
    """Split is the update in smaller micro-batches; skip leaves out the one that does not fit; raise says how much there is."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    weights, num_out_of_memory, samples = found["small"]
    assert (num_out_of_memory, samples) == (0, 8.0)
    assert found["split"][0] == pytest.approx(weights, rel=1e-12)
    assert found["split"][1] >= 1
    assert found["split"][2] == 8.0
    assert found["skip"][1:] == [1, 4.0]
    kept = torch.tensor([0.0, 5.0, 6.0, 7.0], dtype=torch.float64)
    error = 0.25 * kept + 0.5 - kept
    by_hand = [0.25 - 0.1 * float(2 * (error * kept).mean()), 0.5 - 0.1 * float(2 * error.mean())]
    assert found["skip"][0] == pytest.approx(by_hand, rel=1e-12)

    assert "can't allocate memory: you tried to allocate 536870912 bytes" in found["message"]
    advice, summary = found["notes"]
    assert advice.startswith("to fit: smaller micro-batches")
    assert summary.endswith(f"limited to {found['limit'] / 2**30:.2f} GiB")


@linux
def test_the_summary_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resident memory, its peak and the address space are those of this process, in GiB; the limit is the system's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = memory_summary()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from KiB

    numbers = re.fullmatch(
        r"memory of this process: ([\d.]+) GiB resident, ([\d.]+) GiB at most so far; address space ([\d.]+) GiB, not limited",
        found,
    )
    assert numbers
    resident, highest, address_space = map(float, numbers.groups())
    assert 0.02 < resident <= highest + 0.01
    assert highest == pytest.approx(peak, rel=0.1, abs=0.02)
    assert address_space > resident


def test_the_summary_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is CUDA it is that of its allocator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda: "allocated: all of it")
    assert memory_summary() == "allocated: all of it"


def test_where_nothing_is_known_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another system."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory_summary() == ""


@linux
def test_a_proc_that_cannot_be_read_hides_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not mounted."""

    def fail(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc/self/status")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "read_text", fail)
    assert memory_summary() == ""
