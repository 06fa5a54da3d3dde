"""The table of the bitmask kernel over densities, from the CSV file in results/."""

from __future__ import annotations

from rows import markdown, result

from semisparse.patterns import parse_pattern


def densities() -> str:
    """Microseconds of bitmask's decode kernel and of the dense ones, one token, by pattern and shape."""
    rows = result("h200/bitmask-densities.csv")
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))

    def time(pattern: str, kernel: str, shape: tuple[str, str]) -> float:
        return next(
            float(row["us"])
            for row in rows
            if (row["pattern"], row["kernel"], (row["n"], row["k"])) == (pattern, kernel, shape)
        )

    dense = {shape: min(time("0%", kernel, shape) for kernel in ("blas", "decode")) for shape in shapes}
    lines = [
        ["dense, cuBLAS", "", *(f"{time('0%', 'blas', shape):.2f}" for shape in shapes)],
        ["dense, `decode`", "", *(f"{time('0%', 'decode', shape):.2f}" for shape in shapes)],
    ]
    for pattern in dict.fromkeys(row["pattern"] for row in rows if row["format"] == "bitmask"):
        times = [time(pattern, "decode", shape) for shape in shapes]
        zeros = f"{1 - parse_pattern(pattern).density:.0%}".replace("%", " %")
        beside = zip(shapes, times, strict=True)
        lines.append([pattern, zeros, *(f"{us:.2f} ({dense[shape] / us:.2f}x)" for shape, us in beside)])
    return markdown(("", "zeros", *(f"{n} x {k}" for n, k in shapes)), lines)


TABLES = {"bitmask-densities": densities}
