"""Hooks of mkdocs: the first page from README.md, the reference from each `__all__`, and links that lead out of docs/."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MODULES = {
    "ignite_train": "ignite_train/__init__.py",
    "ignite_train.handlers": "handlers/__init__.py",
    "ignite_train.checkpoint": "ignite_train/checkpoint/__init__.py",
}

ELSEWHERE = {"ignite_train.handlers": " [The ready-made handlers](../handlers.md) has them by purpose, with what each costs."}

_LINK = re.compile(r"\[([^\]\n]+)\]\(([^)\s]+)\)")


def public_names(module: str) -> list[str]:
    """The names in `__all__` of a module, which is not imported."""
    tree = ast.parse((ROOT / MODULES[module]).read_text(encoding="utf-8"))
    found = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return list(ast.literal_eval(found[0]))


def reference(module: str) -> str:
    """A page of the API reference, in Markdown."""
    parts = [f"::: {module}.{name}" for name in public_names(module)]
    return "\n\n".join(
        [f"# {module}", f"All public names of `{module}`, in alphabetical order.{ELSEWHERE.get(module, '')}", *parts, ""]
    )


def inside(text: str, folder: str) -> str:
    """A page with its links to files outside of docs/ as plain text, and those from the root to docs/ as links within it.

    Args:
        text: Markdown.
        folder: in which the page lies, "docs" or "".
    """

    def change(match: re.Match[str]) -> str:
        shown, target = match.groups()
        path, _, anchor = target.partition("#")
        if ":" in target or not path:
            return match[0]
        relative = (ROOT / folder / path).resolve().relative_to(ROOT).as_posix()
        if not relative.startswith("docs/"):
            return f"`{relative}`" if shown.strip("`/") in relative else f"{shown} (`{relative}`)"
        return f"[{shown}]({relative.removeprefix('docs/')}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(change, text)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made."""
    from mkdocs.structure.files import File

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=inside(readme, "")))
    for module in MODULES:
        files.append(File.generated(config, f"reference/{module}.md", content=reference(module)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes the links of a page of docs/."""
    return markdown if page.file.generated_by else inside(markdown, "docs")
