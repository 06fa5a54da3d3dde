"""Hooks of mkdocs: files outside docs/ become pages, and links to these files become links to the pages.

Every link is written as a path in the repository, so that it works in the repository and on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

FORMATS = ("bitmask", "dense", "ec_csr", "gqs", "slide24", "vector_nm")

PAGES = {
    **{f"semisparse/formats/{name}/README.md": f"formats/{name}.md" for name in FORMATS},
    "AGENTS.md": "working-on-it.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "results/README.md": "measurements.md",
}
"""Pages of the site by the files outside docs/ that they show."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace a folder in the navigation by its pages, index.md first."""
    config.nav = [_with_folders(entry, Path(config.docs_dir)) for entry in config.nav or []]
    return config


def _with_folders(entry: Any, docs: Path) -> Any:
    if isinstance(entry, list):
        return [_with_folders(each, docs) for each in entry]
    if isinstance(entry, dict):
        return {title: _with_folders(each, docs) for title, each in entry.items()}
    if not entry.endswith("/"):
        return entry
    names = sorted(path.name for path in (docs / entry).glob("*.md"))
    return [entry + name for name in sorted(names, key=lambda name: name != "index.md")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `PAGES`."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages; mkdocs checks that these exist."""
    here = page.file.src_uri
    source = next((name for name, shown in PAGES.items() if shown == here), f"docs/{here}")

    def to_page(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        shown = PAGES.get(target) or target.removeprefix("docs/")
        return posixpath.relpath(shown, posixpath.dirname(here) or ".")

    return LINK.sub(to_page, markdown)
