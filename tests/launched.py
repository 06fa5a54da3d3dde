"""Which kernels a test run launched: with SEMISPARSE_LAUNCHED=FILE their names are appended to it after each test.

``python -m tests.launched FILE ...`` lists every kernel of the project with its number of launches, those of none last.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "semisparse"

launched: Counter[str] = Counter()


def count_launches() -> None:
    """Count the launches of this process in `launched` from now on."""
    from triton.runtime.jit import JITFunction

    from semisparse.runtime.kernel import LoadedKernel

    launch, run = LoadedKernel.__call__, JITFunction.run

    def counted_launch(self: LoadedKernel, *arguments: object, **named: object) -> None:
        launched[self.name] += 1
        launch(self, *arguments, **named)

    def counted_run(self: JITFunction, *arguments: object, **named: object) -> object:
        launched[self.fn.__name__] += 1
        return run(self, *arguments, **named)

    LoadedKernel.__call__, JITFunction.run = counted_launch, counted_run


def store(path: Path) -> None:
    """Append a line per kernel launched since the last call: its number of launches and its name."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{count} {name}\n" for name, count in sorted(launched.items()))
    launched.clear()


def kernels() -> Iterator[str]:
    """Yield the names of all CUDA and Triton kernels of the project."""
    for path in sorted(ROOT.rglob("*.cu")):
        text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
        yield from re.findall(r"__global__[^;{}]*?\b(semisparse_\w+)\s*\(", text)
    for path in sorted(ROOT.rglob("*.py")):
        yield from re.findall(r"@triton\.jit(?:\([^\n]*\))?\ndef (semisparse_\w+)", path.read_text(encoding="utf-8"))


def main() -> None:
    """Add up the files named on the command line and print the table."""
    for path in sys.argv[1:]:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            count, name = line.split()
            launched[name] += int(count)
    for name in sorted(set(kernels()), key=lambda name: (not launched[name], name)):
        print(f"{launched[name]:8} {name}")


if __name__ == "__main__":
    main()
