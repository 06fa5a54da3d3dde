"""``python -m tests.fuzz --cases 20000 --seed 1``: run many cases, count the classes, keep the faults."""

from __future__ import annotations

import argparse
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
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")

    from tests.fuzz.outcome import SOUND
    from tests.fuzz.session import Session

    counts: Counter[str] = Counter()
    faults = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        session = Session(Path(root))
        for done, number in enumerate(range(options.first, options.first + options.cases), 1):
            outcome = session.run(options.seed, number)
            counts[outcome.kind] += 1
            if outcome.kind not in SOUND:
                faults.append({"seed": options.seed, "case": number, "was": outcome.kind})
                print(f"case {number}: {outcome.kind} {outcome.mutations} {outcome.detail[:300]}", flush=True)
            if done % 500 == 0:
                rate = done / (time.perf_counter() - start)
                print(f"{done} cases, {rate:.1f} per second: {dict(counts)}", flush=True)
    print(f"{sum(counts.values())} cases, seed {options.seed}:")
    for kind, count in counts.most_common():
        print(f"{count:7d}  {kind}")
    if faults:
        CORPUS.write_text(json.dumps([*json.loads(CORPUS.read_text()), *faults], indent=1) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
