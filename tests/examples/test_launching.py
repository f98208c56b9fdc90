"""What examples/launch and examples/ray_train.py start: an interrupted run is started again and ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ignite_train import checkpoint
from ignite_train.handlers import HangWatch, StopOnSignal
from processes import DEADLINE_SECONDS
from test_two_hosts import DOCUMENT, ROOT, alone, end, environment, free_port, results, script

__all__ = ["alone", "script"]  # fixtures

LAUNCH = ROOT / "examples" / "launch"

pytestmark = pytest.mark.skipif(not DOCUMENT.is_file(), reason="looks at a checkout, and this is none")

# Runs the script of docs/distributed.md; at update 15, between two saves, rank 1 gets a signal, once. Rank 0 ends last.
INTERRUPTED = """
import atexit, os, runpy, sys, time
from pathlib import Path
import ignite.distributed as idist
from ignite.engine import Events
from ignite_train import Trainer

here, run = Path(__file__).parent, Trainer.run

def run_interrupted(trainer, *arguments, **options):
    begun = []
    @trainer.on(Events.ITERATION_STARTED)
    def tell():
        if not begun:
            begun.append(trainer.state.iteration)
            print(f"begins with update {begun[0]}", flush=True)
    @trainer.on(Events.ITERATION_STARTED(once=15))
    def interrupt():
        if idist.get_rank() == 1 and not (here / "interrupted").exists():
            (here / "interrupted").touch()
            while not (Path(os.environ["RUN_DIR"]) / "update-00000010").exists():  # it is written beside training
                time.sleep(0.02)
            os.kill(os.getpid(), int(sys.argv[2]))
    return run(trainer, *arguments, **options)

def end_last():
    while not (here / "one has ended").exists():
        time.sleep(0.02)

Trainer.run = run_interrupted
if os.environ["RANK"] == "0" and "SLURM_JOB_ID" in os.environ:
    atexit.register(end_last)
runpy.run_path(sys.argv[1], run_name="__main__")
"""

# As SLURM does it, on one machine: a job that is queued again starts at once.
SBATCH = """#!/usr/bin/env bash
cd "${0%/*}"
export SLURM_JOB_NODELIST=here SLURM_JOB_NUM_NODES=1
while :; do
    rm -f requeued
    bash "$@" && status=0 || status=$?
    [[ -e requeued ]] || exit "$status"
done
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then echo 127.0.0.1; else touch requeued; echo "scontrol $*"; fi
"""
SRUN = """#!/usr/bin/env bash
rm -f 'one has ended'
kills=0
while [[ $1 == --* ]]; do
    if [[ $1 == --kill-on-bad-exit=1 ]]; then kills=1; fi
    shift
done
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$@" & done
status=0
for _ in 0 1; do
    wait -n && one=0 || one=$?
    if ((one > status)); then status=$one; fi
    if ((one && kills)); then kill -TERM $(jobs -p); fi
    touch 'one has ended'
done
exit "$status"
"""


def run(command: list[str], settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs it with a hard limit."""
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


def begins(printed: str) -> list[int]:
    """The first update of each rank in each attempt."""
    return sorted(int(number) for number in re.findall(r"begins with update (\d+)", printed))


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint."""
    whole = directory / "whole.pt"
    newest = checkpoint.latest(directory)
    assert newest is not None
    checkpoint.consolidate(newest, whole)
    return torch.load(whole)  # type: ignore[no-any-return]


def submit(directory: Path, script: Path, number: int, *, interrupted: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """Runs the job under a SLURM that is not there."""
    directory.mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("srun", SRUN), ("train.py", INTERRUPTED)):
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    if not interrupted:
        (directory / "interrupted").touch()
    settings = environment(directory, SLURM_JOB_ID=str(os.getpid()), RUN_DIR=str(directory / "run"))
    settings["PATH"] = f"{directory}{os.pathsep}{settings['PATH']}"
    job = [str(LAUNCH / "slurm.sbatch"), str(directory / "train.py"), str(script), str(number)]
    done = run([str(directory / "sbatch"), *job], settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, weights(directory / "run")


@pytest.fixture(scope="module")
def undisturbed(script: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, torch.Tensor]]:
    """What two ranks print and come to, if they are left alone."""
    done, expected = submit(tmp_path_factory.mktemp("job") / "alone", script, 0, interrupted=False)
    assert "requeue" not in done.stdout
    return sorted(results(done.stdout)), expected


def check_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names and the same bits."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.nightly
def test_slurm_queues_a_job_again_whose_time_is_up(script: Path, undisturbed: Any, tmp_path: Path) -> None:
    """SIGUSR1 before the limit: the run saves and goes, the job is queued again, and ends with the bits of a run left alone."""
    done, found = submit(tmp_path / "job", script, signal.SIGUSR1, interrupted=True)
    assert done.stdout.count(f"scontrol requeue {os.getpid()}") == 1
    assert begins(done.stdout) == [1, 1, 16, 16]
    assert sorted(results(done.stdout.partition("scontrol requeue")[2])) == undisturbed[0]
    check_weights(found, undisturbed[1])


@pytest.mark.nightly
def test_torchrun_starts_an_elastic_job_again(script: Path, undisturbed: Any, tmp_path: Path) -> None:
    """With room for more machines: a worker is killed, both are started again, and end with the bits of a run left alone."""
    (tmp_path / "train.py").write_text(INTERRUPTED)
    settings = environment(
        tmp_path,
        HEAD=f"127.0.0.1:{free_port('127.0.0.1')}",
        NNODES="1:3",
        NPROC="2",
        RESTARTS="1",
        JOB=tmp_path.name,
        PET_RDZV_CONF="last_call_timeout=1",  # seconds for which it waits for more machines
        RUN_DIR=str(tmp_path / "run"),
        HEARTBEAT=str(tmp_path / "heartbeat"),
    )
    job = [str(tmp_path / "train.py"), str(script), str(int(signal.SIGKILL))]
    done = run(["bash", str(LAUNCH / "torchrun.sh"), *job], settings)
    assert done.returncode == 0, done.stderr
    assert begins(done.stdout) == [1, 1, 11, 11]
    assert sorted(results(done.stdout)) == undisturbed[0]  # the first attempt did not come so far
    check_weights(weights(tmp_path / "run"), undisturbed[1])
    assert not (tmp_path / "heartbeat").exists()


# The same on a machine that is lost: its agent and its rank are killed at update 15. A rank that is alone before waits for it.
LOST = """
import os, runpy, signal, sys, time
from pathlib import Path
import ignite.distributed as idist
from ignite.engine import Events
from ignite_train import Trainer

here, run = Path(__file__).parent, Trainer.run

def run_and_lose(trainer, *arguments, **options):
    @trainer.on(Events.ITERATION_STARTED(once=15))
    def leave():
        while idist.get_world_size() == 1 and not (here / "lost").exists():
            time.sleep(0.02)
        if "LEAVES" in os.environ:
            while not (Path(os.environ["RUN_DIR"]) / "update-00000010").exists():
                time.sleep(0.02)
            (here / "lost").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    return run(trainer, *arguments, **options)

Trainer.run = run_and_lose
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.nightly
@pytest.mark.timeout(3 * DEADLINE_SECONDS)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="127.0.0.2 is an address of every machine on Linux only")
def test_an_elastic_job_continues_without_a_machine_that_was_lost(script: Path, alone: Any, tmp_path: Path) -> None:
    """Two agents begin, one of them is killed with its rank; the other resumes alone, and makes the updates of one process."""
    (tmp_path / "train.py").write_text(LOST)
    endpoint, agents = f"127.0.0.1:{free_port('127.0.0.1')}", []
    command = ["bash", str(LAUNCH / "torchrun.sh"), str(tmp_path / "train.py"), str(script)]
    with (tmp_path / "stdout").open("w") as output, (tmp_path / "stderr").open("w") as errors:
        for number in (1, 2):
            conf = f"is_host={number == 1},last_call_timeout=10,keep_alive_interval=1"
            own = {"PET_LOCAL_ADDR": f"127.0.0.{number}", "PET_RDZV_CONF": conf, **({"LEAVES": "1"} if number == 2 else {})}
            job = {"HEAD": endpoint, "NNODES": "1:2", "NPROC": "1", "JOB": tmp_path.name, "RUN_DIR": str(tmp_path / "run")}
            settings = environment(tmp_path, **job, **own)
            agents.append(subprocess.Popen(command, env=settings, stdout=output, stderr=errors, start_new_session=True))
        try:
            statuses = [agent.wait(DEADLINE_SECONDS) for agent in agents]
        finally:
            for agent in agents:
                end(agent)
    assert statuses == [0, -signal.SIGKILL], (tmp_path / "stderr").read_text()
    ((rank, ranks, loss, grad_norm),) = results((tmp_path / "stdout").read_text())
    assert (rank, ranks) == (0, 1)
    assert (loss, grad_norm) == (pytest.approx(alone.loss, rel=1e-5), pytest.approx(alone.grad_norm, rel=1e-4))


# --- Kubernetes ---


def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="reads the manifest")
    job: dict[str, Any] = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text(encoding="utf-8"))
    return job


def test_the_manifest_says_what_the_script_needs() -> None:
    """Its fields; and its times, which must be longer than those inside. Its schema was tried by hand."""
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    elastic, workers = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (elastic["rdzvBackend"], elastic["minReplicas"], elastic["maxReplicas"]) == ("c10d", 1, workers["replicas"])
    assert elastic["maxRestarts"] > 0
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    (ranks,) = [int(word.partition("=")[2]) for word in container["command"] if word.startswith("--nproc-per-node=")]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == ranks
    settings = {one["name"]: one["value"] for one in container["env"]}
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(f'os.environ.get("{name}"' in text for name in ("RUN_DIR", "HEARTBEAT"))
    (shared,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "shared"]
    assert settings["RUN_DIR"].startswith(f"{shared}/")
    assert not settings["HEARTBEAT"].startswith(shared)
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    grace = int(settings["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert StopOnSignal().grace_seconds < grace < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("age", "lives"), [(None, True), (0, True), (HangWatch().timeout_seconds + 200, True), (1000, False)], ids=str
)
def test_the_probe_reads_the_heartbeat(age: float | None, lives: bool, tmp_path: Path) -> None:
    """A process lives where the file is young, or is not there; `HangWatch` comes before the probe."""
    (container,) = manifest()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    heartbeat = tmp_path / "heartbeat"
    if age is not None:
        heartbeat.touch()
        os.utime(heartbeat, (time.time() - age, time.time() - age))
    done = run(container["livenessProbe"]["exec"]["command"], {**os.environ, "HEARTBEAT": str(heartbeat)})
    assert (done.returncode == 0, done.stderr) == (lives, "")


# --- Ray ---

UNDER_RAY = """
import os, signal, sys, time
from pathlib import Path
import ignite.distributed as idist
import ray
from ignite.engine import Events
import ray_train
from ignite_train import Trainer
from ignite_train.handlers import StopOnSignal

storage, how = Path(sys.argv[1]), sys.argv[2]

def train(config):
    run = Trainer.run
    def run_interrupted(trainer, *arguments, **options):
        StopOnSignal().attach(trainer)  # hears nothing there, and lets the run continue
        begun = []
        @trainer.on(Events.ITERATION_STARTED)
        def tell():
            if not begun:
                begun.append(trainer.state.iteration)
                print(f"begins with update {begun[0]}", flush=True)
        @trainer.on(Events.ITERATION_STARTED(once=11))
        def interrupt():
            if how == "killed" and idist.get_rank() == 1 and not (storage / "interrupted").exists():
                (storage / "interrupted").touch()
                while not (storage / how / "checkpoints" / "update-00000008").exists():  # it is written beside training
                    time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)
        return run(trainer, *arguments, **options)
    Trainer.run = run_interrupted
    try:
        ray_train.train(config)
    finally:
        Trainer.run = run

ray.init(num_cpus=3, include_dashboard=False)
ray_train.start(storage, how, train=train)
"""


@pytest.mark.nightly
@pytest.mark.timeout(3 * DEADLINE_SECONDS)
def test_ray_starts_a_job_again_whose_worker_was_killed(tmp_path: Path) -> None:
    """In the middle of an epoch, with shards of Ray Data: Ray is told the same numbers, and the bits are equal."""
    pytest.importorskip("ray.train", reason="pip install 'ignite-train[ray]'")
    (tmp_path / "job.py").write_text(UNDER_RAY)
    told, began = {}, {}
    for how in ("alone", "killed"):
        settings = environment(tmp_path, RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
        settings["PYTHONPATH"] += os.pathsep + str(ROOT / "examples")
        done = run([sys.executable, str(tmp_path / "job.py"), str(tmp_path), how], settings)
        assert done.returncode == 0, done.stderr[-10_000:]
        told[how] = re.findall(r"update (\d+): loss (\S+), gradient norm (\S+)", done.stdout)
        began[how] = begins(done.stdout)
    assert began == {"alone": [1, 1], "killed": [1, 1, 9, 9]}
    assert [update for update, *_ in told["alone"]] == ["4", "8", "12", "16", "20", "24"]
    assert told["killed"][-4:] == told["alone"][-4:]
    assert {*told["killed"]} <= {*told["alone"]}  # what Ray has not fetched when a worker dies is lost
    check_weights(weights(tmp_path / "killed" / "checkpoints"), weights(tmp_path / "alone" / "checkpoints"))
