"""Write the tables of README.md and docs/ from the CSV files in results/, or check that they are what these give.

    python benchmarks/tables.py
    python benchmarks/tables.py --check

A page has `<!-- table: NAME -->` before a table and `<!-- end -->` after it; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import density_tables
import engine_tables
import expert_tables
import joint_tables
import quality_tables
import speed_tables
import step_tables

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/performance.md",
    "docs/quality.md",
    "docs/targets.md",
    "docs/experiments/audit.md",
    "docs/experiments/blocks.md",
    "docs/experiments/decode-step.md",
    "docs/experiments/host-path.md",
    "docs/experiments/joint-search.md",
    "docs/experiments/search.md",
    "docs/experiments/pruning.md",
    "docs/kernels/bitmask.md",
    "docs/kernels/every-token.md",
    "docs/kernels/experts.md",
)
TABLES: Mapping[str, Callable[[], str]] = {
    **speed_tables.TABLES,
    **quality_tables.TABLES,
    **joint_tables.TABLES,
    **expert_tables.TABLES,
    **engine_tables.TABLES,
    **density_tables.TABLES,
    **step_tables.TABLES,
}
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write or check every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page would change")
    check = parser.parse_args().check
    stale = []
    for name in PAGES:
        page = ROOT / name
        old = page.read_text()
        new = with_tables(old)
        if old != new:
            stale += [f"{name}, {line}" for line in _changes(old, new)]
            if not check:
                page.write_text(new)
    if check and stale:
        sys.exit("tables that differ from results/ (python benchmarks/tables.py writes them):\n" + "\n".join(stale))


def with_tables(text: str) -> str:
    """Return a page's text with every marked table generated.

    Raises:
        KeyError: a table has an unknown name.
    """
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", text)


def _changes(old: str, new: str) -> list[str]:
    """Return the lines that are in one text only."""
    lines, others = set(old.splitlines()), set(new.splitlines())
    return [f"page: {line}" for line in lines - others] + [f"CSV:  {line}" for line in others - lines]


if __name__ == "__main__":
    main()
