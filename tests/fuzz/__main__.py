"""``python -m tests.fuzz --cases 20000 --seed 1``: run many cases, count the classes, keep the faults."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.json")
FLUSHED = 100
"""Cases after which the counts are written: a run may be killed."""


def write_counts(file: Path | None, by_source: Counter[tuple[str, str]]) -> None:
    """Write the number of cases by directory and outcome, if a file is named."""
    if file:
        with file.open("w", newline="") as opened:
            rows = [(*key, count) for key, count in sorted(by_source.items())]
            csv.writer(opened).writerows([("source", "outcome", "cases"), *rows])


def main() -> None:
    """Run cases and print classes and counts; exit with 1 if there are faults, whose numbers go to the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first case's number")
    parser.add_argument("--sources", help="directories, comma-separated; all by default")
    parser.add_argument("--csv", type=Path, help="a CSV to write: source, outcome, cases")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")

    from tests.fuzz.outcome import SOUND
    from tests.fuzz.session import Session
    from tests.fuzz.sources import SOURCES

    sources = options.sources.split(",") if options.sources else list(SOURCES)
    by_source: Counter[tuple[str, str]] = Counter()
    faults = []
    start = time.perf_counter()
    # Ctrl-C, and the SIGINT of `timeout`, end a run early: what was counted until then stands.
    with tempfile.TemporaryDirectory() as root, suppress(KeyboardInterrupt):
        session = Session(Path(root), sources)
        for done, number in enumerate(range(options.first, options.first + options.cases), 1):
            outcome = session.run(options.seed, number)
            if outcome.kind == "time limit":  # other programs may have taken the time: it is a fault the second time
                outcome = session.run(options.seed, number)
            source = session.source_of(number)
            by_source[source, outcome.kind] += 1
            if outcome.kind not in SOUND:
                faults.append({"seed": options.seed, "case": number, "source": source, "was": outcome.kind})
                print(f"case {number}, {source}: {outcome.kind} {outcome.mutations} {outcome.detail[:300]}", flush=True)
            if done % FLUSHED == 0:
                rate = done / (time.perf_counter() - start)
                print(f"{done} cases, {rate:.1f} per second", flush=True)
                write_counts(options.csv, by_source)
    write_counts(options.csv, by_source)
    counts: Counter[str] = Counter()
    for (_, kind), count in by_source.items():
        counts[kind] += count
    print(f"{counts.total()} cases, seed {options.seed}:")
    for kind, count in counts.most_common():
        print(f"{count:7d}  {kind}")
    if faults:
        CORPUS.write_text(json.dumps([*json.loads(CORPUS.read_text()), *faults], indent=1) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
