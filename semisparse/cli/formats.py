"""``semisparse formats``: list every format and kernel, and whether it runs here."""

from __future__ import annotations

from semisparse.cli.arguments import Json
from semisparse.cli.output import print_json, print_table


def formats(as_json: Json = False) -> None:
    """List every format and kernel, and whether it runs on this machine, or why not.

    Example: `semisparse formats`
    """
    from semisparse.api import list_formats

    rows = list_formats()
    if as_json:
        print_json({"formats": rows})
        return
    for row in rows:
        kernels = [(k["name"], k["device"], "yes" if k["runs"] else k["reason"]) for k in row["kernels"]]
        title = f"{row['name']} (version {row['version']}): {row['summary']}"
        print_table(title, ("kernel", "device", "runs here"), kernels)
