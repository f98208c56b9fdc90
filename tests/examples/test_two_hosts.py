"""The script of docs/distributed.md, under torchrun on two hosts: nothing in it changes, and nothing in its numbers."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import torch
from ignite.engine import Events

import ignite_train
from ignite_train import GaveUpError, NonFiniteError, UpdateOptions, UpdateOutput, create_trainer, handlers
from processes import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "distributed.md"
TORCHRUN, SBATCH = (ROOT / "examples" / "launch" / name for name in ("torchrun.sh", "slurm.sbatch"))
PATIENCE = 60.0  # for a launcher to end what it has started
HANDLERS = ("FailureBoard", "GradNormConsistency", "HangWatch", "StateConsistency", "StopOnSignal")

pytestmark = pytest.mark.skipif(not DOCUMENT.is_file(), reason="looks at a checkout, and this is none")


class Result(NamedTuple):
    """What a rank printed at its end."""

    rank: int
    ranks: int
    loss: float
    grad_norm: float


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script of the document, word for word."""
    text = DOCUMENT.read_text(encoding="utf-8")
    path = tmp_path_factory.mktemp("job") / "train.py"
    path.write_text(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0])
    return path


@pytest.fixture(scope="module")
def alone(script: Path) -> Result:
    """What one process comes to."""
    done = subprocess.run(
        [sys.executable, script],
        env=environment(script.parent),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return results(done.stdout)[0]


def environment(directory: Path, **more: str) -> dict[str, str]:
    """Ours, without a launcher's and without GPUs; `torchrun` and `python` are those of this environment.

    A run begins anew, in a new folder of `directory`.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PET_", "TORCHELASTIC_"))}
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(key, None)
    paths = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]]),
        "PYTHONPATH": str(Path(ignite_train.__file__).parents[1]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RUN_DIR": tempfile.mkdtemp(dir=directory),
    }
    return {**kept, **paths, **more}


def results(printed: str) -> list[Result]:
    """The line of each rank."""
    lines = re.findall(r"rank (\d+) of (\d+): loss (\S+), gradient norm (\S+)", printed)
    return [Result(int(rank), int(ranks), float(loss), float(norm)) for rank, ranks, loss, norm in lines]


# --- two hosts ---


class Host(NamedTuple):
    """Where an agent runs: its address, the network interface to that, and what a command begins with to run there."""

    address: str
    interface: str
    prefix: tuple[str, ...] = ()


class Agent(NamedTuple):
    """A torchrun that has ended: its status, and what it and its ranks printed."""

    status: int
    output: str
    errors: str


def run_agents(script: Path, endpoint: str, hosts: tuple[Host, Host]) -> list[Agent]:
    """Starts examples/launch/torchrun.sh on both hosts, the first of which holds the store, and waits for the end of both."""
    launched = []
    logs = [script.parent / f"{host.address}.{name}" for host in hosts for name in ("output", "errors")]
    deadline = time.monotonic() + DEADLINE_SECONDS
    with ExitStack() as stack:
        shared = tempfile.mkdtemp(dir=script.parent)
        for number, host in enumerate(hosts):
            output, errors = (stack.enter_context(log.open("w")) for log in logs[2 * number : 2 * number + 2])
            settings = {
                "HEAD": endpoint,
                "NNODES": "2",
                "NPROC": "1",
                "JOB": script.parent.name,
                "PET_LOCAL_ADDR": host.address,
                "PET_RDZV_CONF": f"is_host={number == 0},join_timeout={DEADLINE_SECONDS:.0f}",
                "RESTARTS": "0",
                "RUN_DIR": shared,
                "GLOO_SOCKET_IFNAME": host.interface,
            }
            process = subprocess.Popen(
                [*host.prefix, "bash", str(TORCHRUN), str(script)],
                env=environment(script.parent, **settings),
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            stack.callback(end, process)
            launched.append(process)
        while any(process.poll() is None for process in launched) and time.monotonic() < deadline:
            time.sleep(0.05)
        statuses = [process.poll() for process in launched]
    texts = [log.read_text() for log in logs]
    told = "\n".join(f"--- {log.name}\n{text}" for log, text in zip(logs, texts, strict=True))
    assert None not in statuses, f"torchrun did not end within {DEADLINE_SECONDS:g} s\n{told}"
    return [Agent(status or 0, *texts[2 * index : 2 * index + 2]) for index, status in enumerate(statuses)]


def end(process: subprocess.Popen[Any]) -> None:
    """Ends an agent that is still there: as it would be asked to, for it ends its ranks then, and otherwise by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            for child in descendants(process.pid):
                os.kill(child, signal.SIGKILL)
            process.kill()
            process.wait(PATIENCE)


def descendants(pid: int) -> list[int]:
    """The processes that it has started, and those that they have."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [one for child in children for one in (child, *descendants(child))]


def check_agents(agents: list[Agent], alone: Result) -> None:
    """Both hosts ran one rank each, to the same numbers, which are those of one process up to rounding."""
    assert [agent.status for agent in agents] == [0, 0], "\n".join(agent.errors for agent in agents)
    ((first,), (second,)) = [results(agent.output) for agent in agents]
    assert sorted([first.rank, second.rank]) == [0, 1]
    assert (first.ranks, second.ranks) == (2, 2)
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert (first.loss, first.grad_norm) == (pytest.approx(alone.loss, rel=1e-5), pytest.approx(alone.grad_norm, rel=1e-4))
    assert 0 < first.loss < 3.5  # nats per byte: it learns, or equal numbers would say little


def free_port(address: str) -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="127.0.0.2 is an address of every machine on Linux only")
def test_two_agents_on_two_addresses_make_the_updates_of_one_process(script: Path, alone: Result) -> None:
    """Each agent of torchrun has an address of its own, and the store, which one of them holds, is met at the other's."""
    hosts = Host("127.0.0.1", "lo"), Host("127.0.0.2", "lo")
    check_agents(run_agents(script, f"127.0.0.2:{free_port('127.0.0.2')}", hosts), alone)


def ip(*arguments: str) -> str:
    """Configures the network."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=True)
    return done.stdout


@contextmanager
def two_networks() -> Iterator[tuple[Host, Host]]:
    """Two network namespaces, with nothing but a cable between them. Skips the test where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (iproute2)")
    names = [f"ignite_train_{os.getpid()}_{number}" for number in range(2)]
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)  # and its end of the cable
            ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
            for number, name in enumerate(names, start=1):
                ip("-n", name, "address", "add", f"10.0.0.{number}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
            ip("netns", "exec", names[0], "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        first, second = (Host(f"10.0.0.{n}", "eth0", ("ip", "netns", "exec", name)) for n, name in enumerate(names, start=1))
        yield first, second


@pytest.mark.nightly
@pytest.mark.timeout(3 * DEADLINE_SECONDS)
def test_two_agents_on_two_networks_make_the_updates_of_one_process(script: Path, alone: Result) -> None:
    """The hosts share nothing but a cable, and what crosses it is as much as the gradients of all updates are."""
    with two_networks() as hosts:
        agents = run_agents(script, f"{hosts[0].address}:29400", hosts)
        sent = [json.loads(ip("-n", host.prefix[-1], "-s", "-j", "link", "show", "eth0"))[0]["stats64"] for host in hosts]
    check_agents(agents, alone)
    parameters, updates = 256 * 32 + 33 * 64 + 65 * 256, 3 * 8
    assert min(counters["tx"]["bytes"] for counters in sent) > 4 * parameters * updates


# --- the scripts that launch ---


@pytest.mark.parametrize("path", [TORCHRUN, SBATCH], ids=lambda path: path.name)
def test_the_shell_understands_it(path: Path) -> None:
    """`bash -n` finds no fault."""
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")


SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
status=0
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NTASKS=2 bash -c 'echo "$PPID $$"; exec "$@"' task "$@" || status=$?
done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '%s\\n' node7 node8; else echo "scontrol $*"; fi
"""
TASK = """
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(os.getppid(), os.getpid(), *(os.environ[name] for name in names), *sys.argv[1:], flush=True)
sys.exit(int(sys.argv[-1]))
"""


@pytest.mark.parametrize("status", [0, 1, 128 + signal.SIGUSR1])
def test_each_task_of_slurm_is_a_rank(tmp_path: Path, status: int) -> None:
    """Each knows who and where it is, SLURM's signals reach it, and a job that saved before its end is queued again."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("train.py", TASK)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    settings = environment(tmp_path, SLURM_JOB_ID="123456", SLURM_JOB_NODELIST="node[7-8]")
    settings["PATH"] = f"{tmp_path}{os.pathsep}{settings['PATH']}"
    command = ["bash", str(SBATCH), str(tmp_path / "train.py"), "--steps 3", str(status)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == status, done.stderr
    *tasks, said = done.stdout.splitlines() if status > 1 else [*done.stdout.splitlines(), None]
    assert said == ("scontrol requeue 123456" if status > 1 else None)
    for rank in range(2):  # the process that SLURM starts becomes the script: it is not its child
        assert tasks[2 * rank + 1] == f"{tasks[2 * rank]} {rank} 0 2 node7 23456 --steps 3 {status}"


# --- the document ---


def inline_code() -> list[str]:
    """What the document has between single backticks."""
    text = re.sub(r"^```.*?^```", "", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def test_the_document_names_handlers_and_arguments_that_exist() -> None:
    """Each handler with its arguments, each argument of `create_trainer` or `UpdateOptions` with its choices."""
    text, inline, arguments = (
        DOCUMENT.read_text(encoding="utf-8"),
        inline_code(),
        get_type_hints(create_trainer) | get_type_hints(UpdateOptions),
    )
    calls = [(name, inside) for name, inside in re.findall(r"\b([A-Z]\w+)\(([^()]*)\)", text) if name in handlers.__all__]
    taken = {name: {*inspect.signature(getattr(handlers, name)).parameters} for name in handlers.__all__}
    of_handlers = {argument for name in (*HANDLERS, "OuterOptimizer") for argument in taken[name]}
    of_torch = {"find_unused_parameters", "fully_shard", "gradient_as_bucket_view", "nesterov", "no_sync"}
    of_torch |= {"foreach", "fused", "grad_dtype", "reduce_dtype", "reshard_after_forward", "static_graph"}
    of_torch |= {"allreduce_hook", "bucket_cap_mb", "ignored_params", "init_process_group"}
    of_others = {"every", "master_port", "create_evaluator", "create_trainer", *UpdateOutput.__dataclass_fields__}
    of_others |= {"max_epochs", "max_iters", "epoch_length", "terminate_epoch"}  # of a run
    of_others |= {"mesh", "drop_last"}  # of loaders and samplers

    assert sorted({*HANDLERS} - {*handlers.__all__}) == []
    assert sorted({*HANDLERS} - {*inline}) == []
    assert [(name, key) for name, inside in calls for key in re.findall(r"(\w+)=", inside) if key not in taken[name]] == []

    named = {code.partition("=")[0] for code in inline if re.fullmatch(r"[a-z]+(_[a-z]+)+|[a-z_]+=.*", code)}
    assert sorted(named - {*arguments} - of_handlers - of_torch - of_others) == []
    assert {"reduction", "uneven", "on_out_of_memory", "on_nonfinite", "give_up_after"} <= named
    for name in ("reduction", "uneven", "on_out_of_memory", "on_nonfinite"):
        choices = {*get_args(arguments[name])}
        assert {*re.findall(rf'{name}="(\w+)"', "\n".join(inline))} <= choices
        assert name.startswith("on_") or all(f'`"{choice}"`' in text for choice in choices - {"auto"})


def test_the_document_shows_messages_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """As errors print and handlers log; what follows three dots is left open."""
    errors = [
        handlers.PeerFailureError(1, 5, "RuntimeError: boom"),
        GaveUpError(40, 20, "ran out of memory"),
        NonFiniteError(7, math.nan, math.nan, ("rank 1, micro-batch 2 of 4: NaN in the loss, shape ()",)),
        handlers.StateMismatchError(100, ("parameter 0.weight",), ()),
        handlers.GradNormMismatchError(12, (1.0, 2.0), ()),
    ]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, lambda model, x: model(x).sum(), options=UpdateOptions(uneven="error"))
    with pytest.raises(ValueError, match="uneven") as caught:
        trainer.run(iter([torch.ones(1, 1)]))
    trainer = create_trainer(model, optimizer, lambda model, x: model(x).sum())
    handlers.StopOnSignal().attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: signal.raise_signal(signal.SIGTERM))
    trainer.run([torch.ones(1, 1)])
    gone = ["rank 1 is gone: no longer running"]  # tests/handlers/test_failures.py kills a rank and reads it
    printed = [*gone, *map(str, errors), str(caught.value).replace("unknown", "10, rank 1: 8"), *caplog.messages]

    shown = {code for code in inline_code() if re.match(r"(rank|update) \d+.*: |data must|SIGTERM: ", code)}
    assert len(shown) == len(gone) + len(errors) + 2
    assert [code for code in shown if not any(text.startswith(code.removesuffix("...").rstrip()) for text in printed)] == []
    assert "`training hangs: no rank has moved for more than 600 s; rank 1 is behind; ...`" in DOCUMENT.read_text()
    source = inspect.getsource(handlers.hang_watch)  # it ends the process when it says so
    for part in ('f"training hangs: {', 'f"no rank has moved for more than {limit:g} s; {self._behind(', '} behind"'):
        assert part in source
