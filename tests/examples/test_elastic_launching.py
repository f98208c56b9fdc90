"""What examples/launch starts for elastic replicas: a lighthouse and replicas that are started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import elastic_runs
import elastic_script
from test_two_hosts import DOCUMENT, ROOT, free_port

LAUNCH = ROOT / "examples" / "launch"

pytestmark = pytest.mark.skipif(not DOCUMENT.is_file(), reason="looks at a checkout, and this is none")


def wait_for(what: Callable[[], bool], deadline: float) -> None:
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.nightly
def test_a_job_array_is_a_lighthouse_and_replicas(tmp_path: Path) -> None:
    """Each task is a process here. A replica that is killed is started again and joins the other; all tasks end well."""
    pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RUST_LOG": "warn", "GRACE": "1"}
    own = {"RUN_DIR": str(tmp_path), "SLURM_ARRAY_JOB_ID": "7", "PORT": str(free_port("127.0.0.1")), "BIND": "127.0.0.1"}
    hosts = {"HOST": "127.0.0.1", "IGNITE_TRAIN_HOST": "127.0.0.1", "HEARTBEAT_MS": "1500", "JOIN_MS": "10000"}
    arguments = [elastic_script.__file__, str(tmp_path), "1000", "96", "0.1", "samples"]

    def start(number: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **tools, **own, **hosts, "SLURM_ARRAY_TASK_ID": str(number)}
        command = ["bash", str(LAUNCH / "elastic.sbatch"), *arguments]
        with (tmp_path / f"{number}.txt").open("wb") as log:
            return subprocess.Popen(command, env=environment, start_new_session=True, stderr=log)

    def num_come() -> int:
        return (tmp_path / "1.txt").read_text().count("replica 2 has come")

    def scripts() -> list[int]:
        """The children of task 2 that train; it also starts `sleep` and subshells."""
        found = list[int]()
        for child in map(int, Path(f"/proc/{tasks[2].pid}/task/{tasks[2].pid}/children").read_text().split()):
            with suppress(OSError):  # it has ended
                if elastic_script.__file__ in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                    found.append(child)
        return found

    tasks = [start(number) for number in range(3)]
    deadline = time.monotonic() + elastic_runs.SECONDS
    try:
        wait_for(lambda: (tmp_path / "begun").exists() and bool(scripts()), deadline)
        (first,) = scripts()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: scripts() not in ([], [first]), deadline)
        before = num_come()  # the first one may have come late, too
        wait_for(lambda: num_come() > before, deadline)
        (tmp_path / "enough").touch()
        assert [task.wait(deadline - time.monotonic()) for task in tasks] == [0, 0, 0], [
            (tmp_path / f"{number}.txt").read_text() for number in range(3)
        ]
    finally:
        for task in tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
    ends = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(ends) == 2
    elastic_runs.check(ends)


def test_the_manifest_of_elastic_replicas_agrees_with_itself() -> None:
    """Its fields, addresses and numbers; its schema was not tried."""
    yaml = pytest.importorskip("yaml", reason="reads the manifest")
    text = (LAUNCH / "kubernetes_elastic.yaml").read_text(encoding="utf-8")
    parts: dict[str, Any] = {part["kind"]: part for part in yaml.safe_load_all(text)}
    service, job = parts["Service"], parts["Job"]["spec"]
    (server,) = parts["Deployment"]["spec"]["template"]["spec"]["containers"]
    (replica,) = job["template"]["spec"]["containers"]
    settings = {one["name"]: one.get("value") for one in replica["env"]}
    port = service["spec"]["ports"][0]["port"]

    assert f"--bind=0.0.0.0:{port}" in server["command"]
    assert settings["TORCHFT_LIGHTHOUSE"] == f"http://{service['metadata']['name']}:{port}"
    assert {"IGNITE_TRAIN_REPLICA", "IGNITE_TRAIN_HOST", "IGNITE_TRAIN_ENDED"} <= {*settings}
    labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    policy = parts["NetworkPolicy"]["spec"]
    assert service["spec"]["selector"] == labels == policy["podSelector"]["matchLabels"]
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == job["template"]["metadata"]["labels"]
    assert policy["ingress"][0]["ports"][0]["port"] == port
    assert (job["completionMode"], job["completions"]) == ("Indexed", job["parallelism"])
    assert {one["name"] for one in replica["volumeMounts"]} == {one["name"] for one in job["template"]["spec"]["volumes"]}
