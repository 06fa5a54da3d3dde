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
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.json")


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
    counts: Counter[str] = Counter()
    by_source: Counter[tuple[str, str]] = Counter()
    faults = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        session = Session(Path(root), sources)
        for done, number in enumerate(range(options.first, options.first + options.cases), 1):
            outcome = session.run(options.seed, number)
            counts[outcome.kind] += 1
            by_source[session.source_of(number), outcome.kind] += 1
            if outcome.kind not in SOUND:
                source = session.source_of(number)
                faults.append({"seed": options.seed, "case": number, "source": source, "was": outcome.kind})
                print(f"case {number}, {source}: {outcome.kind} {outcome.mutations} {outcome.detail[:300]}", flush=True)
            if done % 500 == 0:
                rate = done / (time.perf_counter() - start)
                print(f"{done} cases, {rate:.1f} per second: {dict(counts)}", flush=True)
    print(f"{sum(counts.values())} cases, seed {options.seed}:")
    for kind, count in counts.most_common():
        print(f"{count:7d}  {kind}")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            rows = [(*key, count) for key, count in sorted(by_source.items())]
            csv.writer(file).writerows([("source", "outcome", "cases"), *rows])
    if faults:
        CORPUS.write_text(json.dumps([*json.loads(CORPUS.read_text()), *faults], indent=1) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
