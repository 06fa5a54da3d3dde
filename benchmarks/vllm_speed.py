"""Latency and throughput of known shapes in vLLM, random weights: dense, vLLM's own low bits, and our formats.

    python benchmarks/vllm_speed.py results/h200/vllm.csv --entries dense,fp8,bitmask+dense@serve,qwen2.5-1.5b/dense

An entry is a way to store the weights, of llama2-7b unless a model is named before it. vLLM's own benchmarks measure
it: `vllm bench latency` and `vllm bench throughput` on one engine; with ``@serve``, `vllm bench serve` at several rates
on one server (to vllm-serve.csv beside the given file). Entries joined by commas start side by side and are then
measured one after another; `+` begins the next group. All share one KV cache (`vllm_cache.py`). A column with an ending
of `VARIANTS` that is not in `WHOLE` is measured with batches alone: prompts and throughput do not change. A server
starts later than an engine of its column, and finds what this has compiled.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vllm_cache import shared_cache
from vllm_checkpoints import COLUMNS, INT4, MODELS, RIVALS, config_of, write_dense, write_ours
from vllm_engine import BATCHES, ENGINE, VARIANTS, WHOLE, Row, measure_engine
from vllm_process import Child, Turn, end_all
from vllm_profiler import BusyRow, ProfileRow
from vllm_prompts import PromptKernelRow
from vllm_serve import ServeRow, measure_server, run_server

WAIT_S = {"written": 90, "prepared": 30, "done": 120}
"""Longest that a checkpoint may be written, that a client may start, and that an engine may measure."""

SERVERS_WAIT_S = 35
"""By how much servers start after an engine of one of their columns: they find most of what it has compiled."""

FIRST_PORT = 8100

IMPORTED = (
    "vllm",
    "vllm.benchmarks.latency",
    "vllm.benchmarks.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.gpu.model_runner",
)
"""Modules that the parent imports; none initialises CUDA, after which a fork could not use it."""


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
            models, columns, endings = ("|".join(names) for names in (MODELS, [*RIVALS, *COLUMNS], VARIANTS))
            raise SystemExit(f"{written}: expected [{models}/]({columns})[{endings}][@serve]")
        return entry

    @property
    def stored(self) -> str:
        """The column without an ending: a checkpoint's name."""
        return self.column.removesuffix(self.variant)

    @property
    def variant(self) -> str:
        """The column's ending, of `VARIANTS`; mostly empty."""
        return next((ending for ending in VARIANTS if self.column.endswith(ending)), "")

    def is_among(self, words: str) -> bool:
        """Return whether words joined by commas name the entry: its column, or that of its model alone."""
        return not {self.column, f"{self.model}/{self.column}"}.isdisjoint(words.split(","))

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
    settings = {**ENGINE, "kv_cache_memory_bytes": args.cache << 30, **VARIANTS.get(entry.variant, {})}
    if entry.stored in RIVALS:
        settings |= {"load_format": "dummy", **RIVALS[entry.stored]}
    if entry.is_among(args.prompts) and not entry.serves:
        settings |= {"compilation_config": {"cudagraph_mode": "NONE"}}  # long prompts run without graphs anyway
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


def inspect_model(turn: Turn, model: str) -> None:
    """Let vLLM inspect a model's code: it does so in a process that imports it anew, and keeps the result on disk."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.models[MODELS[model][1]["architectures"][0]].inspect_model_cls()
    turn.say("inspected")


def start(entry: Entry, port: int, cache: Any, args: Namespace) -> Child:
    """Start the process of an entry; it waits before it starts vLLM.

    Args:
        entry: what it serves.
        port: where it listens if it is a server.
        cache: what opens the KV cache.
        args: the command line.
    """
    folder, log = folder_of(entry, args), Path(args.scratch) / f"{entry.name}.log"
    if entry.serves:
        return Child(entry.name, log, run_server, folder, settings_of(entry, args), cache, port)
    profiles = entry.is_among(args.profile)
    is_brief = entry.is_among(args.brief)
    is_whole = entry.variant in WHOLE and not is_brief and not entry.is_among(args.steps)
    requests = args.requests if is_whole else 0
    engine = folder, settings_of(entry, args), cache
    batches, busy = () if is_brief else BATCHES, args.requests if entry.is_among(args.busy) else 0
    prompts = entry.is_among(args.prompts)
    return Child(entry.name, log, measure_engine, *engine, requests, profiles, batches, busy, prompts)


def start_client(child: Child, entry: Entry, port: int, pair: str, args: Namespace) -> Child:
    """Start the process that measures a server at one rate; it waits before it sends requests.

    Args:
        child: the server.
        entry: what it serves.
        port: where it listens.
        pair: ``16x160`` for 160 requests, 16 per second.
        args: the command line.
    """
    rate, requests = map(int, pair.split("x"))
    log = child.log.with_suffix(f".{pair}.log")
    return Child(f"{entry.name} {pair}", log, measure_server, folder_of(entry, args), port, rate, requests)


def measure_rate(client: Child, entry: Entry, pair: str, args: Namespace) -> None:
    """Let a client measure, and write the row.

    Args:
        client: from `start_client`.
        entry: what its server serves.
        pair: as there.
        args: the command line.
    """
    client.go()
    found = client.messages("done", WAIT_S["done"])
    if found is not None:
        row = {"model": entry.model, "weights": entry.column, "rate": int(pair.partition("x")[0]), **found["done"]}
        add(args.out.with_name("vllm-serve.csv"), ServeRow, [row])
    client.end()


def measure_offline(child: Child, entry: Entry, args: Namespace) -> None:
    """Let an engine measure, and write its rows: also what came of one that failed half-way, or until SIGTERM."""
    child.go()
    try:
        child.messages("done", WAIT_S["done"])
    finally:
        child.end()
        write_offline(child.partial, entry, args)


def write_offline(found: dict[str, Any], entry: Entry, args: Namespace) -> None:
    """Write the rows of what an engine measured.

    Args:
        found: its messages.
        entry: what it served.
        args: the command line.
    """
    same = {"model": entry.model, "weights": entry.column}
    rows = [{**same, **row, "machine": found["row"]["machine"]} for row in found.pop("profile", [])]
    if rows:
        add(args.out.with_name("vllm-kernels.csv"), ProfileRow, rows)
    if "prompt_kernels" in found:
        kernels = [{**same, **row} for row in found.pop("prompt_kernels")]
        add(args.out.with_name("vllm-prompt-kernels.csv"), PromptKernelRow, kernels)
    if "busy" in found:
        shares = [{**same, "cache_gib": args.cache, **share} for share in found.pop("busy")]
        add(args.out.with_name("vllm-busy.csv"), BusyRow, shares)
    if "row" in found:
        layers = config_of(entry.model, args.layers).num_hidden_layers
        values = {name: value for name, value in found.items() if name not in ("row", "done")}
        add(args.out, Row, [{**same, "layers": layers, "cache_gib": args.cache, **found["row"], **values}])


def start_group(
    group: list[Entry], writers: dict[Path, Child], cache: Any, args: Namespace
) -> list[tuple[Child, Entry, int]]:
    """Start the processes of a group once their checkpoints are written; return those that became ready, with ports.

    Args:
        group: what they serve.
        writers: the processes that write checkpoints, by folder; those that have ended are taken out.
        cache: what opens the KV cache.
        args: the command line.
    """
    started = [(start(entry, port, cache, args), entry, port) for port, entry in enumerate(group, FIRST_PORT)]
    for folder in {folder_of(entry, args): None for entry in group}:
        writer = writers.pop(folder, None)
        if writer is not None:
            writer.messages("written", WAIT_S["written"])
            writer.end(20)
    deadline, ready = time.monotonic() + args.ready, []
    engines = {(entry.model, entry.column) for entry in group if not entry.serves}
    later = [entry for entry in group if entry.serves and (entry.model, entry.column) in engines]
    for child, entry, _ in started:
        if entry not in later:
            child.go()
    if later:
        time.sleep(SERVERS_WAIT_S)
    for child, entry, _ in started:
        if entry in later:
            child.go()
    for child, entry, port in started:
        if child.messages("ready", deadline - time.monotonic()) is None:
            child.end()
        else:
            ready.append((child, entry, port))
    return ready


def measure_group(ready: list[tuple[Child, Entry, int]], args: Namespace) -> None:
    """Measure a group's processes in their order: servers at the first rate; at the other rates after all else."""
    first, *others = args.rates.split(",")
    servers = [started for started in ready if started[1].serves]
    clients = {
        (entry, pair): start_client(child, entry, port, pair, args)
        for child, entry, port in servers
        for pair in (first, *others)
    }
    for client in clients.values():
        client.messages("prepared", WAIT_S["prepared"])
    for child, entry, _ in ready:
        if entry.serves:
            measure_rate(clients[entry, first], entry, first, args)
        else:
            measure_offline(child, entry, args)
    for pair in others:
        for _, entry, _ in servers:
            measure_rate(clients[entry, pair], entry, pair, args)
    for child, _, _ in ready:
        child.end()


def run(args: Namespace) -> None:
    """Measure every entry, group by group."""
    groups = [[Entry.parse(word) for word in group.split(",")] for group in args.entries.split("+")]
    writers: dict[Path, Child] = {}
    for entry in (entry for group in groups for entry in group):
        if folder_of(entry, args) not in writers:
            log = Path(args.scratch) / f"write-{entry.model}-{entry.stored}.log"
            writers[folder_of(entry, args)] = Child(f"checkpoint {log.stem}", log, write_checkpoint, entry, args)
    inspectors = [
        Child(f"code of {model}", Path(args.scratch) / f"inspect-{model}.log", inspect_model, model)
        for model in sorted({entry.model for group in groups for entry in group})
    ]
    cache = shared_cache(args.cache, Path(args.scratch) / "cache.log")
    for inspector in inspectors:
        inspector.messages("inspected", WAIT_S["written"])
    for group in groups:
        ready = start_group(group, writers, cache, args)
        while args.hold is not None and not args.hold.exists():
            time.sleep(0.1)
        measure_group(ready, args)


def run_engines(run: Callable[[Namespace], None], args: Namespace, importing: bool = True) -> None:
    """Import vLLM in this process, from which engines are forked, and call ``run``; its engines end with it."""
    Path(args.scratch).mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # `vllm serve` would spawn, and lose `use_shared_cache`
    if importing:
        print(time.strftime("%X"), "importing vLLM", flush=True)
        for module in IMPORTED:
            importlib.import_module(module)
        print(time.strftime("%X"), "imported", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        run(args)
    finally:
        end_all()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--entries", default="dense,fp8,int4,bitmask,gqs-w4s50")
    parser.add_argument("--layers", type=int, help="decoder layers, if not all of the model")
    parser.add_argument("--cache", type=int, default=16, help="GiB of the KV cache")
    parser.add_argument("--requests", type=int, default=500, help="requests of the throughput; 0: batches alone")
    parser.add_argument("--steps", default="", help="columns of which neither prompts nor throughput are measured")
    parser.add_argument("--brief", default="", help="columns, or MODEL/COLUMN, of one sequence alone")
    parser.add_argument("--rates", default="16x160,4x48", help="requests per second x requests of a server")
    parser.add_argument("--profile", default="", help="columns of which a decode step is profiled, to vllm-kernels.csv")
    parser.add_argument(
        "--busy", default="", help="columns whose prompts and throughput are profiled, to vllm-busy.csv"
    )
    parser.add_argument(
        "--prompts", default="", help="columns of which long prompts alone are measured, and every kernel that they run"
    )
    parser.add_argument("--ready", type=float, default=200, help="seconds until a group must have started")
    parser.add_argument("--hold", type=Path, help="measure only once this file exists: other jobs end first")
    parser.add_argument("--late", action="store_true", help="import vLLM in each process, not before they are forked")
    parser.add_argument("--scratch", default="/tmp/vllm", help="where checkpoints and logs are written")
    args = parser.parse_args()
    run_engines(run, args, importing=not args.late)


if __name__ == "__main__":
    main()
