"""``semisparse bench machine``: measure this machine."""

from __future__ import annotations

from dataclasses import asdict

from semisparse.cli.arguments import Device, Json, OutCsv
from semisparse.cli.output import print_json, print_table


def machine(device: Device = "auto", out: OutCsv = None, as_json: Json = False) -> None:
    """Measure this machine: bandwidth, peaks, and the cost of a launch. `plan --gpu auto` uses these rates.

    Example: `semisparse bench machine --out machine.csv`
    """
    from semisparse.api import pick_device
    from semisparse.bench.machine_facts import machine_facts
    from semisparse.bench.table import write_csv

    facts = machine_facts(pick_device(device))
    if out is not None:
        write_csv(out, facts)
    if as_json:
        print_json({"rows": [asdict(fact) for fact in facts]})
    else:
        rows = [[fact.name, f"{fact.value:,.4g}", fact.unit] for fact in facts]
        print_table(facts[0].machine, ["fact", "value", "unit"], rows)
