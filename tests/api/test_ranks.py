"""Several processes compress a model to the bytes that one process gives."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import semisparse
from semisparse.api import compression
from semisparse.compress import calibration, journal, pipeline
from semisparse.compress.search import joint
from semisparse.errors import InputError
from tests.architectures import tiny_model
from tests.compress.checking import Interrupted
from tests.forked import on_ranks
from tests.models import byte_tokenizer, random_model

DOCUMENTS = [f"document {i}: " + "some words to read " * (i % 5) for i in range(40)]
SEARCH = ("pattern=4:8", "search_effort=24", "search_tokens=300")
WAYS: dict[str, dict[str, Any]] = {
    "kept": {"recipe": "rheosparse", "settings": ("prune=none", "pattern=0%", "format=bitmask")},
    "magnitude": {"recipe": "rheosparse", "settings": ("prune=magnitude", "search=none", "pattern=2:4")},
    "sparsegpt": {"recipe": "rheosparse", "settings": ("search=none", "pattern=2:4", "target=residual")},
    "int8": {"recipe": "slidesparse", "settings": ("quant=int8",)},
    "tuned": {"recipe": "gqsa", "settings": ("pattern=g4@50%", "tune=bqpo", "tune_epochs=1")},
    "tuned end to end": {"recipe": "gqsa", "settings": ("pattern=g4@50%", "tune=bqpo+e2e", "tune_epochs=1")},
    "profile": {"recipe": "rheosparse", "settings": ("pattern=4:8", "search_tokens=300")},
    "rheosparse": {"recipe": "rheosparse", "settings": ("search=rheosparse", *SEARCH)},
    "evolution": {"recipe": "rheosparse", "settings": ("search=evolution", *SEARCH)},
    "joint": {"recipe": "auto", "target": {"bits": 9.0}, "settings": ("search_effort=16", "tune=none")},
    "joint, tuned": {
        "recipe": "auto",
        "target": {"bits": 9.0},
        "settings": ("search_effort=16", "search_tokens=300", "prune=magnitude", "tune_epochs=1"),
    },
    "experts": {"recipe": "rheosparse", "settings": ("search=none", "pattern=2:4")},
    "rows": {"recipe": "rheosparse", "settings": ("search=none", "pattern=32:64")},
}
WITHOUT_TEXT = ("kept", "magnitude")
SLOW = ["tuned end to end", "profile", "rheosparse", "evolution", "joint", "joint, tuned"]
FILES = ("model.safetensors", "config.json")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, model in {"llama": random_model("llama", num_hidden_layers=3), "mixtral": tiny_model("Mixtral")}.items():
        model.save_pretrained(path / name)
        byte_tokenizer().save_pretrained(path / name)
    return path


def compress(sources: Path, way: str, out: Path, batch_tokens: int = 64, **more: Any) -> semisparse.CompressionReport:
    calibration.BATCH_TOKENS["cpu"] = batch_tokens
    can_share_rows = pipeline.can_share_rows
    if way == "rows":  # without a GPU, too
        pipeline.can_share_rows = lambda weight, pattern, recipe: True
    hopeless, joint.HOPELESS = joint.HOPELESS, 1e9 if way == "joint, tuned" else joint.HOPELESS
    try:
        return semisparse.compress(
            sources / ("mixtral" if way == "experts" else "llama"),
            calibration=None if way in WITHOUT_TEXT else DOCUMENTS,
            out=out,
            **{"samples": 30, "seqlen": 32, "device": "cpu", **WAYS[way], **more},
        )
    finally:
        calibration.BATCH_TOKENS["cpu"], joint.HOPELESS = 4096, hopeless
        pipeline.can_share_rows = can_share_rows


def join(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    rendezvous = f"file://{folder}/rendezvous"
    distributed.init_process_group("gloo", rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))


def _compress_all(rank: int, ranks: int, sources: Path, folder: Path, ways: list[str], more: dict[str, Any]) -> None:
    join(rank, ranks, folder)
    for way in ways:
        report = compress(sources, way, folder / way, **more)
        assert report.layers
    distributed.destroy_process_group()


def assert_same(one: Path, other: Path) -> None:
    for name in FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (2, ["sparsegpt", "experts"]),
        pytest.param(2, ["magnitude", "rows", "kept", "int8", "tuned"], marks=pytest.mark.slow),
        pytest.param(3, ["sparsegpt", "experts", "rows"], marks=pytest.mark.slow),
        pytest.param(5, ["rows"], marks=pytest.mark.slow),
        pytest.param(2, SLOW, marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_gives_the_same_bytes(ranks: int, ways: list[str], sources: Path, tmp_path: Path):
    (tmp_path / "several").mkdir()
    on_ranks(_compress_all, (ranks, sources, tmp_path / "several", ways, {}), ranks)
    for way in ways:
        report = compress(sources, way, tmp_path / way)
        assert_same(tmp_path / way, tmp_path / "several" / way)
        assert way != "joint, tuned" or len((report.search or {})["tuned"]) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_more_ranks_than_batches(sources: Path, tmp_path: Path):
    (tmp_path / "several").mkdir()
    on_ranks(_compress_all, (3, sources, tmp_path / "several", ["experts"], {"batch_tokens": 4096, "samples": 2}), 3)
    compress(sources, "experts", tmp_path / "one", batch_tokens=4096, samples=2)
    assert_same(tmp_path / "one", tmp_path / "several" / "experts")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_run_on_one_rank_is_resumed_on_two(sources: Path, tmp_path: Path):
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "decoder layer 3 of 3":
            raise Interrupted

    ways, several = ["sparsegpt", "tuned"], tmp_path / "several"
    for way in ways:
        compress(sources, way, tmp_path / way)
        with pytest.raises(Interrupted):
            compress(sources, way, several / way, progress=interrupt)
    on_ranks(_compress_all, (2, sources, several, ways, {"resume": True}), 2)
    for way in ways:
        assert_same(tmp_path / way, several / way)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "way", ["sparsegpt", *(pytest.param(way, marks=pytest.mark.slow) for way in ("tuned", "experts", "evolution"))]
)
def test_states_on_disk_give_the_same_bytes(way: str, sources: Path, tmp_path: Path):
    (tmp_path / "states").mkdir()
    said: list[str] = []
    compress(sources, way, tmp_path / "memory")
    compress(sources, way, tmp_path / "disk", offload=tmp_path / "states", inform=said.append)
    assert_same(tmp_path / "memory", tmp_path / "disk")
    assert f"of {tmp_path / 'states'} for hidden states" in said[0]
    assert not list((tmp_path / "states").iterdir())


def _refused(rank: int, ranks: int, sources: Path, folder: Path) -> None:
    join(rank, ranks, folder)
    refused = "rank 1 on .* differs in recipe .*start the same command with the same versions and devices everywhere"
    with pytest.raises(InputError, match=refused):
        compress(sources, "magnitude" if rank else "kept", folder / "out")
    if rank:
        torch.set_num_threads(2)
    with pytest.raises(InputError, match=r"rank 1 on .* differs in number of CPU threads \(2; rank 0 on .* has 1\)"):
        compress(sources, "kept", folder / "out")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(journal, "__version__", "0.0")
        with pytest.raises(
            InputError,
            match=r"rank 1 on .* differs in versions \(semisparse 0\.0 torch .*; rank 0 on .* has semisparse",
        ):
            compress(sources, "kept", folder / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "_machine_facts", lambda _: {"GPU": "NVIDIA A100" if rank else "NVIDIA H100"})
        with pytest.raises(
            InputError, match=r"rank 1 on .* differs in GPU \(NVIDIA A100; rank 0 on .* has NVIDIA H100"
        ):
            compress(sources, "kept", folder / "out")
    with pytest.raises(InputError, match="with several ranks, out is required"):
        compress(sources, "kept", None)  # type: ignore[arg-type]
    assert not (folder / "out").exists()
    distributed.destroy_process_group()


def test_ranks_that_differ_are_refused(sources: Path, tmp_path: Path):
    on_ranks(_refused, (2, sources, tmp_path), 2)
