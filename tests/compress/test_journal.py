"""Interrupted and resumed runs give the same weights; damaged journals and those of other runs are not used."""

import os
import signal
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from semisparse.compress import (
    InPlace,
    Journal,
    Ranks,
    Recipe,
    SharedJournal,
    compress_decoder_layers,
    fingerprint,
    open_journal,
    weights_digest,
)
from semisparse.compress.journal import DTYPES, PARTS, recorded_parts
from semisparse.errors import InputError, SemisparseError
from tests.compress.checking import Interrupted, equal_weights
from tests.forked import exit_code
from tests.models import VOCABULARY, random_model

RECIPE = Recipe(pattern="2:4")


def calibration(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (4, 30), generator=generator) for _ in range(2)]


def identity(model: PreTrainedModel, **changes: object) -> dict[str, str]:
    given = {"model": model, "batches": calibration(), "recipe": RECIPE, "seed": 0, "device": "cpu"} | changes
    settings = fingerprint(given["batches"], given["recipe"], seed=given["seed"], device=given["device"])
    return settings | {"model weights": weights_digest(given["model"])}


def run(directory: Path | None, progress: Callable[[str, int, int], None] = lambda *_: None) -> PreTrainedModel:
    model = random_model("llama")
    journal = Journal(directory, identity(model)) if directory else None
    compress_decoder_layers(model, calibration(), RECIPE, progress=progress, store=InPlace(journal))
    return model


@pytest.fixture(scope="module")
def uninterrupted() -> PreTrainedModel:
    return run(None)


@pytest.mark.parametrize("calls", [1, 5, 8, 9, 16])
def test_resumed_at_any_call_of_progress(uninterrupted: PreTrainedModel, tmp_path: Path, calls: int):
    """Each decoder layer has seven linear layers and calls once more at its start."""
    left = calls

    def interrupt(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(tmp_path, interrupt)
    done: list[int] = []
    assert equal_weights(run(tmp_path, lambda _, linears, __: done.append(linears)), uninterrupted)
    assert done[:2] == ([0, 7] if calls > 8 else [0, 1])


def run_until_killed(directory: Path, at: str, left: int) -> None:
    """Run, and kill this process at a call of the progress callback or of a function of `os`."""

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if at == "progress":
        run(directory, count)
    else:
        real = getattr(os, at)
        setattr(os, at, lambda *arguments: (count(), real(*arguments))[1])
        run(directory)


@pytest.mark.parametrize(("at", "times"), [("progress", 12), ("replace", 3), ("fsync", 5)])
def test_resumed_after_sigkill(uninterrupted: PreTrainedModel, tmp_path: Path, at: str, times: int):
    """While it prunes the second decoder layer, and while it writes the first one to the journal."""
    assert exit_code(run_until_killed, tmp_path, at, times) == -signal.SIGKILL
    assert equal_weights(run(tmp_path), uninterrupted)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[20] ^= 1  # in the checksum or the header: a changed last digit may be the same float
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        pytest.param("block-0000.safetensors", cut, marks=pytest.mark.slow),
        ("block-0000.safetensors", flip),
        pytest.param("block-0000.safetensors", Path.unlink, marks=pytest.mark.slow),
        pytest.param("block-0001.json", flip, marks=pytest.mark.slow),
        ("block-0001.json", Path.unlink),
        ("block-0001.json", lambda path: path.write_text("[]")),
    ],
)
def test_a_damaged_piece_is_computed_again(
    uninterrupted: PreTrainedModel, tmp_path: Path, name: str, spoil: Callable[[Path], None]
):
    run(tmp_path)
    spoil(tmp_path / name)
    if (tmp_path / "block-0001.json").exists():
        with pytest.warns(UserWarning, match=r"block-000\d of the interrupted run .* computed again"):
            resumed = run(tmp_path)
    else:
        resumed = run(tmp_path)
    assert equal_weights(resumed, uninterrupted)


def test_reports_come_back(tmp_path: Path):
    model = random_model("llama")
    journal = Journal(tmp_path, identity(model))
    reports = compress_decoder_layers(model, calibration(), RECIPE, store=InPlace(journal))
    again = random_model("llama")
    store = InPlace(Journal(tmp_path, identity(again)))
    assert compress_decoder_layers(again, calibration(), RECIPE, store=store) == reports


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"recipe": Recipe(pattern="4:8")}, "recipe"),
        ({"batches": calibration(seed=1)}, "calibration tokens"),
        ({"batches": [torch.cat(calibration())]}, "calibration tokens"),
        ({"seed": 1}, "seed"),
        ({"device": "cuda:0"}, "device"),
        ({"model": random_model("llama", torch.float32)}, "model weights"),
        ({"seed": 1, "recipe": Recipe(pattern="4:8")}, "recipe, seed"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, change: dict[str, object], differing: str):
    model = random_model("llama")
    Journal(tmp_path, identity(model))
    Journal(tmp_path, identity(model))
    with pytest.raises(InputError, match=f"differs in: {differing};"):
        Journal(tmp_path, identity(model) | identity(**{"model": model} | change))


def test_one_changed_weight_makes_another_model():
    model = random_model("llama")
    before = identity(model)
    model.lm_head.weight.data[3, 3] += 1
    assert identity(model)["model weights"] != before["model weights"]


def test_a_source_tree_that_is_not_installed_has_a_fingerprint(monkeypatch: pytest.MonkeyPatch):
    def not_installed(name: str) -> None:
        raise metadata.PackageNotSearchResultError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", not_installed)
    assert identity(random_model("llama"))["versions"].startswith("semisparse ")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_an_unreadable_fingerprint_is_refused(tmp_path: Path, content: str):
    (tmp_path / "fingerprint.json").write_text(content)
    with pytest.raises(InputError, match="remove"):
        Journal(tmp_path, identity(random_model("llama")))


def test_a_full_disk_leaves_no_half_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = random_model("llama")
    journal = Journal(tmp_path, identity(model))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.save_layer(0, {"layer": torch.ones(2, 2)}, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fingerprint.json"]
    assert journal.load_layer(0) is None


class ElsewhereRanks(Ranks):
    """A rank whose host does not see what the first one writes."""

    rank = 1

    def first(self, compute: Callable[[], Any]) -> None:
        return None


def test_a_host_that_does_not_see_the_journal_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"does not see .*; --out must be on a file system that all ranks share"):
        open_journal(tmp_path / "out.partial", {}, ElsewhereRanks())
    assert not list(tmp_path.iterdir()), "and nothing is made there"


def test_only_the_first_rank_writes(tmp_path: Path):
    journal = Journal(tmp_path, {PARTS: "16"})
    SharedJournal(journal, ElsewhereRanks()).save("part", 0, {}, "notes")
    assert SharedJournal(journal, ElsewhereRanks()).load("part", 0) is None
    assert journal.load("part", 0) is None
    SharedJournal(journal, Ranks()).save("part", 0, {"a": torch.ones(2)}, "notes")
    tensors, notes = SharedJournal(journal, Ranks()).load("part", 0) or ({}, None)
    assert (tensors["a"].tolist(), notes) == ([1.0, 1.0], "notes")


def test_a_resumed_run_keeps_the_parts_of_its_sums(tmp_path: Path):
    assert recorded_parts(tmp_path) is None
    Journal(tmp_path, {PARTS: "16"})
    assert recorded_parts(tmp_path) == 16


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint16])
def test_a_piece_is_a_safetensors_file(dtype: torch.dtype, tmp_path: Path):
    """With tensors of any dtype, of no elements and of no dimension. One dtype is left to safetensors."""
    numbers = torch.arange(24).to(dtype)
    tensors = {
        "b": numbers.view(4, 6).clone(),
        "columns": numbers.view(4, 6).T,
        "one": numbers[3].clone(),
        "none": numbers[:0].view(0, 3).clone(),
        "masks": torch.tensor([[True, False, True]]),
        "a": torch.arange(3, dtype=torch.float64),
    }
    journal = Journal(tmp_path, {})
    journal.save("part", 0, tensors, {"a": 1})
    with safe_open(tmp_path / "part-0000.safetensors", "pt") as file:  # safetensors checks the header
        assert set(file.keys()) == set(tensors)
    for found, notes in (journal.written("part", 0), journal.load("part", 0) or ({}, None)):
        assert notes == {"a": 1}
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name
            assert found[name].data_ptr() % tensor.element_size() == 0


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_a_piece_that_cannot_be_read_again(tmp_path: Path):
    journal = Journal(tmp_path, {})
    journal.save("part", 0, {"a": torch.zeros(3)}, None)
    cut(tmp_path / "part-0000.safetensors")
    with pytest.raises(SemisparseError, match=r"part-0000\.safetensors was written and cannot be read again"):
        journal.written("part", 0)
