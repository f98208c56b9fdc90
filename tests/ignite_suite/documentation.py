"""Runs the code in the documentation of the installed Ignite: README, pages, docstrings of its engine, handlers and metrics.

`python documentation.py stock SOURCE` and `python documentation.py ours SOURCE` print what became of each block, as JSON: by
its name, whether it ran, what it printed, how it called trackers and which files it left, or the error. SOURCE is a checkout or
an unpacked source distribution, which has the pages; without it the docstrings are run. With `ours` a trainer is in the place
of `Engine`, as in trainer_as_engine.py. An engine that a block has made and not run is run afterwards.

Names that the documentation does not define are stand-ins, the same for both; see stand_ins.py. A block sees what the blocks
before it on the same page or in the same docstring have left.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stand_ins import Namespace, Trackers, install_trackers, repaired

SECONDS = 40
ROUNDS = 2  # epochs of an engine that a block has not run
DIRECTIVE = re.compile(r"^( *)\.\. (testcode|code-block:: python|testsetup)\b.*\n((?:\1 +.*\n|\s*\n)+)", flags=re.MULTILINE)
FENCE = re.compile(r"^( *)```(python)\n(.*?)^\1```", flags=re.MULTILINE | re.DOTALL)
Block = tuple[str, str, str]  # name, set-up and code


def blocks(source: Path | None) -> Iterator[list[Block]]:
    """The blocks of each docstring and of each page."""
    import ignite.engine
    import ignite.handlers
    import ignite.metrics

    for package in (ignite.engine, ignite.handlers, ignite.metrics):
        names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
        for name in [package.__name__, *names]:
            yield from _blocks_of(importlib.import_module(name))
    if source is not None:
        yield _blocks_in(FENCE, "README.md", (source / "README.md").read_text(encoding="utf-8"))
        for page in ("engine", "handlers", "metrics"):
            yield _blocks_in(DIRECTIVE, f"{page}.rst", (source / f"docs/source/{page}.rst").read_text(encoding="utf-8"))


def _blocks_of(module: Any) -> Iterator[list[Block]]:
    for name, node in _documented(ast.parse(inspect.getsource(module)), module.__name__):
        yield _blocks_in(DIRECTIVE, name, (ast.get_docstring(node) or "") + "\n")


def _documented(node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str) -> Iterator[tuple[str, Any]]:
    """A module, its classes and functions, and their methods, by name."""
    yield name, node
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)):
            yield from _documented(child, f"{name}.{child.name}")


def _blocks_in(pattern: re.Pattern[str], name: str, text: str) -> list[Block]:
    found = [(kind, textwrap.dedent(body)) for _, kind, body in pattern.findall(text)]
    setup = "\n".join(_code(body) for kind, body in found if kind == "testsetup")
    codes = [_code(body) for kind, body in found if kind != "testsetup"]
    return [(f"{name}:{number}", setup, code) for number, code in enumerate(codes, start=1)]


def _code(body: str) -> str:
    """The body of a directive without its options."""
    return re.sub(r"^\s*:\w+:.*\n", "", body.lstrip("\n"), flags=re.MULTILINE)


def outcome(names: Namespace, code: str, trackers: Trackers) -> list[Any]:
    """What a block does: that it ran and what came of it, or its error."""
    printed = io.StringIO()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    before = set(names)
    trackers.calls()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            exec(repaired(code), names)  # noqa: S102
            made = {name: value for name, value in names.items() if name not in before or name in code}
            problem = _run_those_left(made, names)
    except BaseException as error:
        return ["failed", f"{type(error).__name__}: {error}"]
    finally:
        signal.alarm(0)
    files = sorted(str(path) for path in Path().rglob("*") if path.is_file())
    return ["ran", _masked(printed.getvalue()), problem, trackers.calls(), sorted({_masked(name) for name in files})]


def _run_those_left(made: dict[str, Any], names: Namespace) -> str:
    """Runs the engines that the block has made, or attached something to, and has not run; and says what went wrong then."""
    import ignite.engine

    for engine in made.values():
        if isinstance(engine, ignite.engine.engine.Engine) and engine.state.iteration == 0:
            try:
                engine.run(names["data"], max_epochs=ROUNDS)
            except Exception as error:
                return type(error).__name__
    return ""


def _masked(text: str) -> str:
    """Without what differs from run to run: times, processes, hosts."""
    if "Time profiling" in text or "Event Name" in text:
        return "a table of times"
    text = re.sub(r"\d+\.\d{3,}e?-?\d*|\d+:\d\d:\d\d|tfevents\S+|0x[0-9a-f]+", "#", text)
    return re.sub(r"(?m)^.*(\d(s|sec|ms)\b|it/s|[Tt]ime|<?Engine|Trainer).*$", "#", text)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> None:
    """Prints the outcomes of all blocks."""
    import matplotlib as mpl

    report = os.dup(1)  # a stand-in is 1 where a number is needed, and some code closes a file by its number
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent.parent)]
    source = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None
    if sys.argv[1] == "stock":
        os.environ["IGNITE_SUITE_STOCK"] = "1"
    import torch
    import trainer_as_engine

    torch.set_num_threads(1)  # several threads that spin on a busy machine take seconds for what takes milliseconds
    trackers = install_trackers()
    trainer_as_engine.pytest_configure(None)
    mpl.use("Agg")
    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.get_device_name = lambda *_: "none"  # type: ignore[assignment]
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for number, group in enumerate(blocks(source)):
            names = None
            for name, setup, code in group:
                names = Namespace(names)
                trackers.with_pandas = "time_profilers" in name
                sys.modules.pop("pandas", None)
                folder = Path(place) / f"{number}-{name.rpartition(':')[2]}"
                folder.mkdir()
                os.chdir(folder)
                found[name] = outcome(names, f"{setup}\n{code}", trackers)
        os.chdir("/")
    with os.fdopen(report, "w") as file:
        file.write(json.dumps(found))


if __name__ == "__main__":
    main()
