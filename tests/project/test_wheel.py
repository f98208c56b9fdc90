"""What is built from a checkout: complete, nothing beside the package in it, and good where no checkout is near."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "ignite_train").is_dir(), reason="builds from a checkout, and this is none")

USERS_HANDLERS = "OWN = 'a module of the user'\n"
USERS_SCRIPT = """
import sys
from pathlib import Path

import handlers
import torch
from ignite_train import ForwardOutput, create_trainer
from ignite_train import handlers as ours

assert handlers.OWN == "a module of the user"
for package in (sys.modules["ignite_train"], ours):
    assert Path(package.__file__).is_relative_to(sys.argv[1]), package.__file__
for name in ours.__all__:
    getattr(ours, name)

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
trainer = create_trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.5),
    lambda model, x: ForwardOutput((model(x) - 1).square().sum(), sample_size=len(x)),
    accumulation_steps=2,
)
ours.EmptyCache().attach(trainer)
trainer.run([torch.ones(2, 1), torch.ones(1, 1)])
print(trainer.state.num_steps, model.weight.item())
"""


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a Python command; what went wrong is shown whole."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _copy_checkout(to: Path) -> Path:
    """Copies what git has or would add, links as links."""
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(".git", *ignored))
    return to


def _build(checkout: Path, *what: str) -> Path:
    _run("-m", "build", "--no-isolation", "--outdir", checkout / "built", *what, checkout, cwd=checkout.parent)
    (wheel,) = (checkout / "built").glob("*.whl")
    return wheel


def _files(checkout: Path) -> set[str]:
    """What a wheel of the checkout must hold beside its metadata."""
    package = checkout / "ignite_train"
    core = {f"ignite_train/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    handlers = {f"ignite_train/handlers/{path.name}" for path in (checkout / "handlers").glob("*.py")}
    return core | handlers | {"ignite_train/py.typed", "ignite_train/handlers/py.typed"}


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _copy_checkout(tmp_path_factory.mktemp("checkout") / "ignite-train")


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """The wheel as it is published: by way of the source distribution."""
    return _build(checkout)


@pytest.mark.slow
def test_the_wheel_is_whole(checkout: Path, wheel: Path):
    """The wheel holds each file of the core and of handlers/, once, under `ignite_train` and with its types; nothing else."""
    assert _names(wheel) == sorted(_files(checkout))


@pytest.mark.slow
def test_the_readme_comes_along(wheel: Path):
    """The wheel describes itself by the README; without the file a build would not even complain."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()

    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in described


@pytest.mark.slow
def test_the_source_distribution_holds_handlers_once(checkout: Path, wheel: Path):
    """The source distribution holds handlers/ as the checkout does: in its own folder, not through the link too."""
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]

    assert sorted(name for name in names if name.startswith("handlers/")) == sorted(
        name.removeprefix("ignite_train/") for name in _files(checkout) if name.startswith("ignite_train/handlers/")
    )
    assert [name for name in names if name.startswith("ignite_train/handlers")] == []


@pytest.mark.slow
@pytest.mark.parametrize("has_link", [True, False])
def test_every_way_to_build_makes_the_same_wheel(tmp_path: Path, wheel: Path, has_link):
    """Straight from a checkout, also where git could not make the link, the wheel holds the same files."""
    copy = _copy_checkout(tmp_path / "ignite-train")
    link = copy / "ignite_train/handlers"
    assert link.is_symlink()
    if not has_link:  # what git writes with core.symlinks=false
        target = link.readlink()
        link.unlink()
        link.write_text(target.as_posix())

    assert _names(_build(copy, "--wheel")) == _names(wheel)


@pytest.mark.slow
def test_the_wheel_trains_beside_a_users_own_handlers(tmp_path: Path, wheel: Path):
    """Installed far from any checkout the library trains, also next to a `handlers.py` of the user's."""
    installed, user = tmp_path / "installed", tmp_path / "user"
    _run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", installed, wheel, cwd=tmp_path)
    user.mkdir()
    (user / "handlers.py").write_text(USERS_HANDLERS)
    (user / "train.py").write_text(USERS_SCRIPT)

    assert _run("train.py", installed, cwd=user, PYTHONPATH=str(installed)) == "1 1.0\n"
