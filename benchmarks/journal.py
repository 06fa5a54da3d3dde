"""Seconds of writing a packed decoder layer to the journal and mapping it again.

Usage: python benchmarks/journal.py OUT.csv BUILD [--rounds 7]

The piece has the sizes of a decoder layer of llama2-7b at 32:64 in bfloat16. `seconds` is the shortest wall time of all
rounds, `cpu_seconds` the shortest CPU time of the process; `waiting` is the longest time that another thread of Python
waited for Python's lock, the shortest of all rounds. BUILD names the code on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch
from rows import read_rows, write_rows

from semisparse.compress import Journal

COLUMNS = ("build", "megabytes", "seconds", "cpu_seconds", "waiting")
SHAPES = ((4096, 4096),) * 4 + ((11008, 4096),) * 3


def piece() -> dict[str, torch.Tensor]:
    """Return the tensors of a packed decoder layer."""
    values = {f"{index} values": torch.zeros(n, k // 2, dtype=torch.bfloat16) for index, (n, k) in enumerate(SHAPES)}
    masks = {f"{index} masks": torch.zeros(n, k // 64, dtype=torch.int64) for index, (n, k) in enumerate(SHAPES)}
    return values | masks


class Waiting:
    """The longest time between two turns of a thread that sleeps for a millisecond each."""

    def __init__(self) -> None:
        self.longest, self._done = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now


def main() -> None:
    """Append a row to the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("build")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    tensors, found = piece(), []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder, Waiting() as waiting:
            journal = Journal(folder, {})
            read = getattr(journal, "written", journal.load)  # earlier builds compare the checksum again
            started, cpu = time.perf_counter(), time.process_time()
            journal.save("block", 0, tensors, [])
            read("block", 0)
            spent = time.perf_counter() - started, time.process_time() - cpu
        found.append((*spent, waiting.longest))
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    best = (f"{min(each):.2f}" for each in zip(*found, strict=True))
    row = dict(zip(COLUMNS, (options.build, f"{size:.0f}", *best), strict=True))
    write_rows(options.out, [*read_rows(options.out), row], COLUMNS)
    print(row)


if __name__ == "__main__":
    main()
