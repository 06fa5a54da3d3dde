"""Before any work, the memory that a compression takes is reported, and too little memory is refused."""

from pathlib import Path

import pytest
import torch

import semisparse
from semisparse.api import compression, needs, read_recipe
from semisparse.api.needs import Needs, free_memory
from semisparse.compress import Ranks
from semisparse.compress.search import streaming
from semisparse.errors import InputError
from tests.models import byte_tokenizer, random_model

DOCUMENTS = [f"document {i}: " + "some words to read " * (i % 5) for i in range(40)]


@pytest.mark.parametrize("missing", ["host", "GPU"])
def test_too_little_memory_is_refused_before_any_work(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compression, "needs_of", lambda *_: Needs(3 << 30, 5 << 30, 0))
    free = Needs(4 << 30, 9 << 29, 0) if missing == "GPU" else Needs(5 << 29, 6 << 30, 0)
    monkeypatch.setattr(compression, "free_memory", lambda *_: free)
    said: list[str] = []
    amount = "5.4 GB of GPU memory, 4.8 GB are free" if missing == "GPU" else "3.2 GB of host memory, 2.7 GB are free"
    with pytest.raises(InputError, match=f"compressing takes up to {amount}: use fewer --samples"):
        semisparse.compress(
            random_model("llama"), byte_tokenizer(), calibration=DOCUMENTS, out=tmp_path / "out", inform=said.append
        )
    assert said == ["compressing takes up to 3.2 GB of host memory, 5.4 GB of GPU memory"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_counts_without_its_page_cache(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = list(needs.CGROUPS.values())[version == 1]
    monkeypatch.setattr(needs, "CGROUPS", {tmp_path: names})
    device, machine = torch.device("cpu"), needs.psutil.virtual_memory().total
    limit, used, cached = names
    (tmp_path / used).write_text("900000\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\n{cached} 600000\n")
    (tmp_path / limit).write_text("1000000\n")
    assert free_memory(device, None).host == 700000
    (tmp_path / limit).write_text("max\n")
    assert 700000 < free_memory(device, None).host <= machine
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / "memory.stat").unlink()  # some sandboxes lack this file
    assert 700000 < free_memory(device, None).host <= machine


@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_all_cgroups_hold(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As Slurm sets them: the job's limit is in a folder below the root, its step has none, the root has none."""
    names = list(needs.CGROUPS.values())[version == 1]
    monkeypatch.setattr(needs, "CGROUPS", {tmp_path / "root": names})
    own = "5:cpu,cpuacct:/\n3:memory,hugetlb:/job/step\n0::/else" if version == 1 else "3:memory:/else\n0::/job/step"
    (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr(needs, "OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "root" / "job" / "step").mkdir(parents=True)
    for folder, most in (("root", None), ("root/job", "3000000"), ("root/job/step", "9223372036854771712"), (".", "7")):
        for name, content in zip((*names[:2], "memory.stat"), (most, "1000000", f"{names[2]} 200000"), strict=True):
            if content:
                (tmp_path / folder / name).write_text(f"{content}\n")
    assert free_memory(torch.device("cpu"), None).host == 2200000
    (tmp_path / "root" / "job" / "step" / names[0]).write_text("1500000\n")
    assert free_memory(torch.device("cpu"), None).host == 700000
    (tmp_path / "own").unlink()
    assert free_memory(torch.device("cpu"), None).host > 3000000


def test_needs_grow_with_the_tokens_and_not_with_the_layers():
    def host(tokens: int, **settings: int) -> int:
        model, plan = random_model("llama", **settings), semisparse.api.read_recipe("rheosparse", ["search=none"])
        batches = [torch.zeros(1, tokens, dtype=torch.int64)]
        layers = compression.list_decoder_layers(model, plan, {})
        return needs.needs_of(model, layers, plan, batches, torch.device("cpu"), Ranks(), None).host

    assert host(1000) == host(1000, num_hidden_layers=4)
    assert host(2000) - host(1000) == 1000 * (2 * 4 * 24 + needs.BATCH_BYTES * 44)


def test_only_a_search_over_a_bank_holds_the_whole_model():
    def of(search: str, **sizes: int) -> int:
        model, plan = random_model("llama", **sizes), semisparse.api.read_recipe("rheosparse", [f"search={search}"])
        layers, batches = compression.list_decoder_layers(model, plan, {}), [torch.zeros(1, 1000, dtype=torch.int64)]
        return needs.needs_of(model, layers, plan, batches, torch.device("cpu"), Ranks(), None).host

    assert of("profile") > of("none")
    assert of("profile", num_hidden_layers=9) == of("profile")
    layer = sum(weight.numel() for weight in random_model("llama").model.layers[0].parameters())
    assert of("evolution", num_hidden_layers=9) - of("evolution", num_hidden_layers=2) == 7 * 4 * layer


@pytest.mark.slow
def test_a_search_holds_one_decoder_layer_where_the_model_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    """With the same result; what it is said to take does not grow by the model's weights."""
    said, reports = list[str](), []
    real, whole, streamed = compression.needs_of, Needs(3 << 30, 0, 0), Needs(1 << 30, 0, 0)
    monkeypatch.setattr(compression, "needs_of", lambda *_, streams=False: streamed if streams else whole)
    settings, scorers = ["search=evolution", "search_effort=6"], []
    kept = streaming.StreamingScorer._begin
    monkeypatch.setattr(
        streaming.StreamingScorer, "_begin", lambda self, *rest: scorers.append(self) or kept(self, *rest)
    )
    for free in (4, 2):
        monkeypatch.setattr(compression, "free_memory", lambda *_, free=free: Needs(free << 30, 0, 0))
        model = random_model("llama")
        how = {"calibration": DOCUMENTS, "settings": settings, "inform": said.append, "device": "cpu"}
        reports.append(semisparse.compress(model, byte_tokenizer(), **how).search)
        assert bool(scorers) is (free == 2)
    assert reports[0] == reports[1]
    assert said == ["compressing takes up to 3.2 GB of host memory", "compressing takes up to 1.1 GB of host memory"]

    def of(layers: int) -> int:
        model, plan = random_model("llama", num_hidden_layers=layers), read_recipe("rheosparse", settings)
        facts = model, compression.list_decoder_layers(model, plan, {}), plan, [torch.zeros(1, 1000, dtype=torch.int64)]
        return real(*facts, torch.device("cpu"), Ranks(), None, streams=True).host

    assert of(9) - of(2) == 7 * streaming.KEPT * 4 * 24 * 1000


def test_training_on_predictions_takes_a_copy_of_the_model_and_distilling_its_moments():
    def of(tune: str) -> int:
        model, plan = random_model("llama", num_hidden_layers=9), semisparse.api.read_recipe("gqsa", [f"tune={tune}"])
        layers, batches = compression.list_decoder_layers(model, plan, {}), [torch.zeros(1, 10, dtype=torch.int64)]
        return needs.needs_of(model, layers, plan, batches, torch.device("cpu"), Ranks(), None).host

    weights = sum(parameter.numel() for parameter in random_model("llama", num_hidden_layers=9).parameters())
    assert of("bqpo+kl") - of("bqpo+e2e") == 4 * weights + 10 * needs.PREDICTION_BYTES
    assert of("bqpo+distil") - of("bqpo+kl") == 4 * 4 * weights


def test_hidden_states_on_disk_are_counted_there(tmp_path: Path):
    def of(offload: Path | None, *settings: str) -> Needs:
        model, plan = random_model("llama"), semisparse.api.read_recipe("gqsa", ["pattern=g4@50%", *settings])
        layers, batches = compression.list_decoder_layers(model, plan, {}), [torch.zeros(1, 5000, dtype=torch.int64)]
        return needs.needs_of(model, layers, plan, batches, torch.device("cpu"), Ranks(), offload)

    memory, disk = of(None, "tune=none"), of(tmp_path, "tune=none")
    assert (memory.offload, disk.offload) == (0, 2 * 4 * 24 * 5000)
    assert memory.host - disk.host == disk.offload
    assert of(tmp_path, "tune=bqpo").offload == 3 * 4 * 24 * 5000, "the targets, too"
    assert f"1 MB of {tmp_path} for hidden states" in str(disk)
    assert str(disk.on_each(2)).endswith(f"2 MB of {tmp_path} for hidden states, in 2 ranks on this host")


def test_an_offload_directory_that_is_missing_or_too_small_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"--offload .*none is no directory; make it"):
        semisparse.compress(random_model("llama"), byte_tokenizer(), calibration=DOCUMENTS, offload=tmp_path / "none")
    room = Needs(0, 0, 0, 900_000_000, tmp_path)
    with pytest.raises(InputError, match=f"take up to 1.0 GB of {tmp_path}, 0.9 GB are free: use fewer --samples"):
        Needs(0, 0, 0, 1_000_000_000, tmp_path).check(room)
    Needs(0, 0, 0, 800_000_000, tmp_path).check(room)


@pytest.mark.slow
def test_a_joint_search_stores_every_layer_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where no way is left out, the unfinished work takes the disk that was said, or somewhat less."""
    said, most = list[Needs](), [0]

    def recorded(*facts) -> Needs:
        said.append(needs.needs_of(*facts))
        return said[-1]

    def progress(stage: str, done: int, total: int) -> None:
        most[0] = max(most[0], sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()))

    monkeypatch.setattr(compression, "needs_of", recorded)
    target = {"bits": 6.0}
    arguments = {"calibration": DOCUMENTS, "samples": 8, "seqlen": 32, "out": tmp_path / "out", "target": target}
    semisparse.compress(random_model("llama"), byte_tokenizer(), "auto", **arguments, progress=progress)
    expected = said[0].disk
    assert 0.2 * expected < most[0] < expected, (expected, most)
