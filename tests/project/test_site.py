"""The site has a page for each document, and an entry for each public name; `make docs` refuses warnings and dead links."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import FunctionType

import pytest

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / "docs/site_hooks.py"

pytestmark = pytest.mark.skipif(not HOOKS.is_file(), reason="looks at a checkout, and here is none")


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", HOOKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("module", ["ignite_train", "ignite_train.handlers", "ignite_train.checkpoint"])
def test_the_reference_is_complete(module: str, hooks) -> None:
    """Each public name of each public module has an entry, and classes and functions a docstring."""
    public = importlib.import_module(module)

    assert sorted(re.findall(rf"^::: {module}\.(\w+)$", hooks.reference(module), re.MULTILINE)) == sorted(public.__all__)
    assert f"reference/{module}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    values = {name: getattr(public, name) for name in public.__all__}
    assert [name for name, value in values.items() if isinstance(value, type | FunctionType) and not value.__doc__] == []


def test_each_document_is_in_the_menu() -> None:
    """Of docs/, and the README as the first page."""
    menu = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))

    assert menu == {"index.md", *(path.name for path in (ROOT / "docs").glob("*.md"))}
    assert "strict: true" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_links_that_lead_out_of_the_site_become_text(hooks) -> None:
    """And those of the README into docs/ remain links."""
    text = "[a](docs/start.md#install) [b](examples/digits.py) [`digits.py`](examples/digits.py) [c](https://pytorch.org)"

    assert hooks.inside(text, "") == (
        "[a](start.md#install) b (`examples/digits.py`) `examples/digits.py` [c](https://pytorch.org)"
    )
    assert hooks.inside("[a](../tests/conftest.py) [b](start.md#x)", "docs") == "a (`tests/conftest.py`) [b](start.md#x)"
