"""Latency and throughput of known shapes in vLLM, random weights: dense, vLLM's own low bits, and our formats.

    python benchmarks/vllm_speed.py results/h200/vllm.csv --entries dense,fp8,bitmask+dense@serve,qwen2.5-1.5b/dense

An entry is a way to store the weights, of llama2-7b unless a model is named before it. vLLM's own benchmarks measure
it: `vllm bench latency` and `vllm bench throughput` on one engine; with ``@serve``, `vllm bench serve` at several rates
on one server (to vllm-serve.csv beside the given file). Entries joined by commas start side by side and are then
measured one after another; `+` begins the next group. All share one KV cache (`vllm_cache.py`).
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_cache import shared_cache, use_shared_cache
from vllm_checkpoints import COLUMNS, INT4, MODELS, RIVALS, config_of, write_dense, write_ours
from vllm_engine import ENGINE, FUSED, ProfileRow, Row, measure_engine
from vllm_process import Child, Turn
from vllm_serve import ServeRow, measure_server, run_server

WAIT_S = {"ready": 260, "done": 100}
"""Longest that an engine may start, and measure."""


@dataclass(frozen=True)
class Entry:
    """What one process serves.

    Args:
        model: whose shapes the layers have.
        column: how the weights are stored.
        serves: whether it is a server.
    """

    model: str
    column: str
    serves: bool

    @classmethod
    def parse(cls, written: str) -> Entry:
        """Return the entry that a word of the command line means."""
        name, _, kind = written.partition("@")
        model, _, column = name.rpartition("/")
        entry = cls(model or "llama2-7b", column, kind == "serve")
        if kind not in ("", "serve") or entry.model not in MODELS or entry.stored not in {*COLUMNS, *RIVALS}:
            raise SystemExit(
                f"{written}: expected [{'|'.join(MODELS)}/]({'|'.join([*RIVALS, *COLUMNS])})[{FUSED}][@serve]"
            )
        return entry

    @property
    def stored(self) -> str:
        """The column without its ending `FUSED`: a checkpoint's name."""
        return self.column.removesuffix(FUSED)

    @property
    def name(self) -> str:
        """Its name in file names."""
        return f"{self.model}-{self.column}{'-serve' if self.serves else ''}".replace(":", "-")


def folder_of(entry: Entry, args: Namespace) -> Path:
    """Return where an entry's checkpoint is written."""
    return Path(args.scratch) / f"{entry.model}-{entry.stored}".replace(":", "-")


def write_checkpoint(turn: Turn, entry: Entry, args: Namespace) -> None:
    """Write an entry's checkpoint; of vLLM's own columns config.json alone."""
    folder, config = folder_of(entry, args), config_of(entry.model, args.layers)
    folder.mkdir(parents=True, exist_ok=True)
    if entry.stored in COLUMNS:
        write_ours(folder, config, entry.stored)
    else:
        write_dense(folder, config, INT4 if entry.stored == "int4" else None)
    turn.say("written")


def settings_of(entry: Entry, args: Namespace) -> dict[str, Any]:
    """Return an engine's arguments."""
    settings = {**ENGINE, "kv_cache_memory_bytes": args.cache << 30}
    if entry.column.endswith(FUSED):
        settings["additional_config"] = {"semisparse_fusion": True}
    if entry.stored in RIVALS:
        settings |= {"load_format": "dummy", **RIVALS[entry.stored]}
    return settings


def add(path: Path, kind: type[Any], rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file, with its header if it is new; what a row lacks stays empty.

    Raises:
        SystemExit: the file has other columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new, names = not path.exists(), [field.name for field in fields(kind)]
    if not is_new and path.read_text().partition("\n")[0] != ",".join(names):
        raise SystemExit(f"{path} has other columns than {', '.join(names)}: give another file")
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        if is_new:
            table.writeheader()
        table.writerows(rows)


def start(entry: Entry, port: int, args: Namespace) -> Child:
    """Start the process of an entry; it waits before it starts vLLM."""
    folder, log = folder_of(entry, args), Path(args.scratch) / f"{entry.name}.log"
    if entry.serves:
        return Child(entry.name, log, run_server, folder, settings_of(entry, args), port)
    profiles = entry.column in args.profile.split(",") and entry.model == "llama2-7b"
    fused = entry.column.endswith(FUSED)
    return Child(entry.name, log, measure_engine, folder, settings_of(entry, args), args.requests, profiles, not fused)


def measure(child: Child, entry: Entry, port: int, args: Namespace) -> None:
    """Let an entry's process measure, and write its rows, also those of a process that failed half-way."""
    same = {"model": entry.model, "weights": entry.column}
    if entry.serves:
        for pair in args.rates.split(","):
            rate, requests = map(int, pair.split("x"))
            client = Child(
                f"{entry.name} {pair}",
                child.log.with_suffix(f".{rate}.log"),
                measure_server,
                folder_of(entry, args),
                port,
                rate,
                requests,
            )
            found = client.messages("done", WAIT_S["done"])
            if found is not None:
                add(args.out.with_name("vllm-serve.csv"), ServeRow, [{**same, **found["done"], "rate": rate}])
            client.end()
    else:
        child.go()
        child.messages("done", WAIT_S["done"])
        found = child.partial
        rows = [{**same, **row, "machine": found["row"]["machine"]} for row in found.pop("profile", [])]
        add(args.out.with_name("vllm-kernels.csv"), ProfileRow, rows)
        if "row" in found:
            layers = config_of(entry.model, args.layers).num_hidden_layers
            values = {name: value for name, value in found.items() if name not in ("row", "done")}
            add(args.out, Row, [{**same, "layers": layers, "cache_gib": args.cache, **found["row"], **values}])
    child.end()


def run(args: Namespace) -> None:
    """Measure every entry, group by group."""
    groups = [[Entry.parse(word) for word in group.split(",")] for group in args.entries.split("+")]
    scratch, every = Path(args.scratch), [entry for group in groups for entry in group]
    writers = {
        folder_of(entry, args): Child(
            f"checkpoint of {entry.model} {entry.stored}",
            scratch / f"write-{entry.name}.log",
            write_checkpoint,
            entry,
            args,
        )
        for entry in {(entry.model, entry.stored): entry for entry in every}.values()
    }
    holder, handle = shared_cache(args.cache, scratch / "cache.log")
    use_shared_cache(handle)
    written: set[Path] = set()
    for group in groups:
        ports = [8100 + i for i in range(len(group))]
        children = [start(entry, port, args) for entry, port in zip(group, ports, strict=True)]
        for entry in group:
            if folder_of(entry, args) not in written:
                writer = writers[folder_of(entry, args)]
                writer.messages("written", 120)
                writer.end(20)
                written.add(folder_of(entry, args))
        for child in children:
            child.go()
        ready = [child.messages("ready", WAIT_S["ready"]) is not None for child in children]
        for child, entry, port, is_up in zip(children, group, ports, ready, strict=True):
            if is_up:
                measure(child, entry, port, args)
            else:
                child.end()
    holder.end()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--entries", default="dense,fp8,int4,bitmask,gqs-w4s50")
    parser.add_argument("--layers", type=int, help="decoder layers, if not all of the model")
    parser.add_argument("--cache", type=int, default=16, help="GiB of the KV cache")
    parser.add_argument("--requests", type=int, default=500, help="requests of the throughput")
    parser.add_argument("--rates", default="4x48,16x160", help="requests per second x requests of a server")
    parser.add_argument("--profile", default="", help="columns of which a decode step is profiled, to vllm-kernels.csv")
    parser.add_argument("--scratch", default="/tmp/vllm", help="where checkpoints and logs are written")
    args = parser.parse_args()
    Path(args.scratch).mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    print(time.strftime("%X"), "importing vLLM", flush=True)
    for module in (
        "vllm",
        "vllm.benchmarks.latency",
        "vllm.benchmarks.serve",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.worker.gpu.model_runner",
    ):
        __import__(module)
    print(time.strftime("%X"), "imported", flush=True)
    run(args)


if __name__ == "__main__":
    main()
