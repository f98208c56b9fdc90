"""TensorBoard in a real browser: the groups, the charts and the curves in them that a person sees."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from ignite.engine import Events
from PIL import Image

import cuts
from ignite_train import create_evaluator, create_trainer
from ignite_train.handlers import TensorBoard, TrainingMetrics, Validation
from processes import DEADLINE_SECONDS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
LEFT_OF_THE_CHARTS, BELOW_THE_TITLE = 360, 130  # in pixels of the picture

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(4 * DEADLINE_SECONDS),
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium, which Debian has as the package chromium"),
]


def train(directory: Path) -> None:
    """Ten epochs of six updates, with all that `TensorBoard` can show."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    evaluator, every = create_evaluator(model, cuts.forward), Events.ITERATION_COMPLETED(every=2)
    tensorboard = TensorBoard(directory, config={"width": 8}, histograms=6)
    tensorboard.attach(trainer, every, evaluator=evaluator)
    tensorboard.show(trainer, lambda: {"samples/text": "once upon a time", "samples/digit": torch.rand(1, 8, 8)})
    TrainingMetrics().attach(trainer, every)
    Validation(evaluator, DATA).attach(trainer)
    trainer.run(DATA, max_epochs=10)


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address at which TensorBoard shows `directory`, on a free port."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            lines = (re.search(r"at (http://\S+/)", line) for line in server.stderr)
            yield next(found for found in lines if found)[1]
        finally:
            server.kill()


def browse(address: str, profile: Path, *options: str) -> str:
    """Has the browser open a page and wait until it is drawn."""
    assert BROWSER is not None
    window = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1100"]
    command = [BROWSER, *window, "--virtual-time-budget=20000", f"--user-data-dir={profile}", *options, address]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_SECONDS).stdout


def text_of(page: str) -> str:
    """What a page says, without its marks."""
    page = re.sub(r"<(style|script)[^>]*>.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def curves(picture: Path) -> int:
    """How many columns of the picture's charts have a pixel in TensorBoard's orange, the colour of the first run."""
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)[BELOW_THE_TITLE:, LEFT_OF_THE_CHARTS:]
    orange = np.abs(pixels - np.array([255, 112, 67])).sum(axis=2) < 40
    return int(orange.any(axis=0).sum())


def test_a_run_is_seen_in_a_browser(tmp_path: Path) -> None:
    """The groups of scalars, histograms and samples; and curves of training and validation in one chart."""
    train(tmp_path / "runs/first")
    with served(tmp_path / "runs") as address:
        shown = text_of(browse(f"{address}#timeseries", tmp_path / "profile", "--dump-dom"))
        sections = re.findall(r"([\w.]+) (\d+) cards", shown)
        names = [name for name, _ in sections if name != "samples"]
        assert names[:2] == ["train", "validation"]
        assert {*names[2:]} == {"weights", "weights.gradients", "weights.updates"}
        groups = dict(sections)
        assert int(groups["train"]) >= 3
        assert int(groups["validation"]) == 2
        picture = tmp_path / "custom_scalars.png"
        browse(f"{address}#custom_scalars", tmp_path / "profile", f"--screenshot={picture}")
        assert curves(picture) > 300, "two charts of about 250 columns"


def test_an_empty_directory_has_no_curves(tmp_path: Path) -> None:
    """So the test above can fail."""
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs") as address:
        browse(f"{address}#custom_scalars", tmp_path / "profile", f"--screenshot={tmp_path / 'empty.png'}")
        assert curves(tmp_path / "empty.png") < 100
