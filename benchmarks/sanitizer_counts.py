"""Put the launches that compute-sanitizer watched into a CSV, a row per tool and kernel.

Usage: python benchmarks/sanitizer_counts.py results/h200/sanitizers.csv FOLDER [--gpu "NVIDIA H200"]

FOLDER holds ``launched-TOOL.NAME.txt`` (what SEMISPARSE_LAUNCHED wrote) and ``TOOL.NAME.log`` (the run's output), both
of the present kernels. Launches take the place of those in the CSV, which may be of an older kernel. A log with a
report is an error: read it. Prints the kernels that no tool, or not each tool, has seen.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

from rows import read_rows, write_rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.launched import kernels

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
COLUMNS = ("gpu", "tool", "kernel", "launches", "reports")
REPORT = re.compile(r"^=========\s.*(Error:|Warning:|Invalid|Uninitialized|Barrier error|SUMMARY: [1-9])", re.MULTILINE)


def counts(folder: Path, tool: str) -> Counter[str]:
    """Return the launches of each kernel under a tool.

    Raises:
        SystemExit: a log has a report.
    """
    launched: Counter[str] = Counter()
    for file in sorted(folder.glob(f"launched-{tool}.*.txt")):
        log = file.with_name(f"{file.stem.removeprefix('launched-')}.log")
        found = REPORT.search(log.read_text(encoding="utf-8", errors="replace"))
        if found:
            raise SystemExit(f"{log}: {found.group()}")
        for line in file.read_text(encoding="utf-8").splitlines():
            count, name = line.split()
            launched[name] += int(count)
    return launched


def main() -> None:
    """Update the CSV and print what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="NVIDIA H200")
    options = parser.parse_args()
    rows = {(row["tool"], row["kernel"]): row for row in read_rows(options.csv)}
    for tool in TOOLS:
        for name, count in counts(options.folder, tool).items():
            values = (options.gpu, tool, name, str(count), "0")
            rows[tool, name] = dict(zip(COLUMNS, values, strict=True))
    ordered = sorted(rows.values(), key=lambda row: (TOOLS.index(row["tool"]), row["kernel"]))
    write_rows(options.csv, ordered, COLUMNS)
    for tool in TOOLS:
        seen = {row["kernel"] for row in ordered if row["tool"] == tool and row["launches"] != "0"}
        print(f"{tool}: not launched: {', '.join(sorted(set(kernels()) - seen)) or 'none'}")


if __name__ == "__main__":
    main()
