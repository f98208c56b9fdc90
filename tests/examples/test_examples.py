"""The examples run as a user starts them, shortened: alone, with `--nproc 2` and under torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from processes import DEADLINE_SECONDS
from tiers import nightly, slow

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
TINY = [
    *("--max-updates", "6", "--max-bytes", "60000", "--context", "32", "--layers", "1", "--width", "32", "--micro-batch", "8"),
    *("--log-every", "1", "--evaluate-every", "3", "--sample", "20"),
]

pytestmark = [
    pytest.mark.timeout(DEADLINE_SECONDS + 60),
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="looks at a checkout, and this is none"),
]


def _run(example: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Returns what the example prints; it must succeed in time, and no process is left over."""
    command = [sys.executable, *launcher, str(EXAMPLES / example), *arguments]
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            printed, errors = process.communicate(timeout=DEADLINE_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            raise
    assert process.returncode == 0, errors
    return printed


def _numbers(pattern: str, printed: str) -> list[float]:
    match = re.search(pattern, printed)
    assert match, printed
    return [float(number) for number in match.groups()]


def _losses(printed: str) -> list[float]:
    """The last update's loss and gradient norm, and the bits per byte of the model and of the bigrams."""
    return [
        *_numbers(r"last update: loss ([\d.]+) nats per byte, gradient norm ([\d.]+)", printed),
        *_numbers(r"held-out files: ([\d.]+) bits per byte", printed),
        *_numbers(r"byte bigrams: +([\d.]+) bits per byte", printed),
    ]


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(log_dir: Path) -> str:
    """What the language model prints when it trains in one process."""
    return _run("language_model.py", *TINY, "--log-dir", str(log_dir))


@pytest.mark.slow
def test_the_language_model_trains(alone: str, log_dir: Path) -> None:
    """It evaluates during the run and once at its end, and says how to see the curves."""
    evaluations = re.findall(r"validation after update (\d+): .*bits_per_byte ([\d.]+)", alone)
    assert [update for update, _ in evaluations] == ["3", "6"]
    assert float(evaluations[1][1]) < float(evaluations[0][1]) < 9
    assert "finished after 6 updates (6 steps, 0 skipped) in 1 epoch" in alone
    assert f"tensorboard --logdir {log_dir}" in alone


@pytest.mark.nightly
def test_the_language_model_has_the_same_losses_on_two_processes(alone: str, tmp_path: Path) -> None:
    """Cut over two processes, an update is the same up to rounding."""
    two = _run("language_model.py", *TINY, "--nproc", "2", "--log-dir", str(tmp_path))
    assert _losses(two) == pytest.approx(_losses(alone), rel=2e-5)


@pytest.mark.nightly
def test_an_interrupted_language_model_goes_on(alone: str, tmp_path: Path) -> None:
    """Ctrl-C, the same command again: it ends where an uninterrupted run ends; and once more: there is nothing to do."""
    command = [sys.executable, str(EXAMPLES / "language_model.py"), *TINY, "--save-every", "1", "--log-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("validation after update 3"):
                process.send_signal(signal.SIGINT)
                break
        printed = process.communicate(timeout=DEADLINE_SECONDS)[0]
    (stopped,) = _numbers(r"stopped after update (\d+); the same command continues from there", printed)
    assert stopped < 6

    again = _run("language_model.py", *TINY, "--save-every", "1", "--log-dir", str(tmp_path))
    once_more = _run("language_model.py", *TINY, "--save-every", "1", "--log-dir", str(tmp_path))

    assert f"resumed after update {stopped:.0f} from " in again
    assert _losses(again) == _losses(once_more) == _losses(alone)
    assert "finished after" not in once_more


@pytest.mark.slow
def test_the_curve_is_drawn(alone: str, log_dir: Path, tmp_path: Path) -> None:
    """From the event files of a run."""
    picture = tmp_path / "docs" / "curve.png"
    _run("plot_curve.py", "--log-dir", str(log_dir), "--output", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), nightly(TORCHRUN)], ids=["alone", "torchrun"])
def test_digits_are_recognised(launcher: tuple[str, ...]) -> None:
    """The same script, unchanged, in one process and in two."""
    (accuracy,) = _numbers(r"held-out accuracy: ([\d.]+)% of 360 images", _run("digits.py", launcher=launcher))
    assert accuracy >= 97


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["alone", "torchrun"])
def test_digits_are_tuned(launcher: tuple[str, ...]) -> None:
    """`--tune` prints one table, also of two processes, and trains nothing."""
    printed = _run("digits.py", "--tune", "3", launcher=launcher)
    assert printed.count("present: micro_batch=64") == 1
    assert "not varied:" in printed or "nothing was faster" in printed or "to have it:" in printed
    assert "held-out accuracy" not in printed


def _curve(printed: str) -> list[tuple[float, ...]]:
    """Update, loss, gradient norm and bytes of each line that the Llama prints."""
    lines = re.findall(r"update (\d+): loss ([\d.]+), gradient norm ([\d.]+), (\d+) bytes", printed)
    return [tuple(map(float, line)) for line in lines]


@pytest.mark.nightly
def test_the_llama_has_the_loss_curve_of_one_process_on_a_mesh(tmp_path: Path) -> None:
    """Tensor parallel over 2 ranks, sharded over 2, activations recomputed; and one process continues from its checkpoint."""
    arguments = ["--in-float64", "--max-updates"]
    alone = _curve(_run("llama.py", *arguments, "7"))
    four = _curve(_run("llama.py", *arguments, "5", "--nproc", "4", "--directory", str(tmp_path)))
    after = _curve(_run("llama.py", *arguments, "7", "--directory", str(tmp_path)))
    assert [update for update, *_ in alone] == [1, 2, 3, 4, 5, 6, 7]
    assert len(four) == 5
    for ours, theirs in zip([*four, *after], alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("example", [slow("language_model.py"), nightly("digits.py")])
def test_help_names_the_options(example: str) -> None:
    printed = _run(example, "--help")
    assert "--nproc" in printed
    assert "--seed" in printed
