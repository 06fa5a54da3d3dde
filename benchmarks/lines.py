"""Lines of the project by folder and language, at some commits: a CSV row each.

python benchmarks/lines.py results/lines.csv 8a8c3ad d4a9f9b HEAD
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from pathlib import Path

from rows import write_rows

LANGUAGES = {".py": "Python", ".cu": "CUDA", ".cuh": "CUDA", ".cpp": "C++", ".hpp": "C++", ".h": "C++"}
COLUMNS = ("commit", "folder", "language", "files", "lines", "code", "prose")


def main() -> None:
    """Count, and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("commits", nargs="+")
    options = parser.parse_args()
    rows = [row for commit in options.commits for row in count(_git("rev-parse", "--short", commit).strip())]
    write_rows(options.csv, rows, COLUMNS)


def count(commit: str) -> list[dict[str, str]]:
    """Return the rows of a commit."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for path in map(Path, _git("ls-tree", "-r", "--name-only", commit).splitlines()):
        if path.suffix in LANGUAGES:
            folder = "/".join(
                path.parts[: min(2, len(path.parts) - 1)] if path.parts[0] == "semisparse" else path.parts[:1]
            )
            source = _git("show", f"{commit}:{path}")
            lines = source.splitlines()
            prose = _prose(source) if path.suffix == ".py" else {i for i, line in enumerate(lines) if _is_comment(line)}
            code = sum(bool(line.strip()) for i, line in enumerate(lines) if i not in prose)
            found = totals.setdefault((folder, LANGUAGES[path.suffix]), Counter())
            found.update(files=1, lines=len(lines), code=code, prose=len(prose))
    return [
        {"commit": commit, "folder": folder, "language": language, **{name: str(found[name]) for name in COLUMNS[3:]}}
        for (folder, language), found in sorted(totals.items())
    ]


def _prose(source: str) -> set[int]:
    """Return the indices of the lines of docstrings and of comments of their own."""
    lines = {i for i, line in enumerate(source.splitlines()) if line.strip().startswith("#")}
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                lines.update(range(item.lineno - 1, item.end_lineno or item.lineno))
    return lines


def _is_comment(line: str) -> bool:
    return line.strip().startswith(("//", "/*", "*"))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
