"""Compressed directories in the real vLLM package, at one and two ranks, beside the transformers path."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import semisparse
from semisparse.errors import CheckpointError, InputError
from semisparse.formats.base import Packed, bytes_on_gpu
from semisparse.integrations.transformers import sparse_layers
from semisparse.nn import CopiedLinear
from semisparse.nn.dense_copy import MANY_TOKENS
from semisparse.patterns import parse_pattern
from tests.serving import SIZES, Served, every_format, one, write
from tests.vllm import ranks

pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving sets it up")

pytestmark = pytest.mark.xdist_group("vllm")  # one process makes `directories`

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SERVED = {served.name: served for served in every_format()}
WORLDS = (1, 2)


def parts_of(name: str) -> list[str]:
    parent, _, own = name.rpartition(".")
    return [f"{parent}.{part}" for part in FUSED.get(own, (own,))]


def linears(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """The linear layers of the decoder, compressed or not."""
    return {name: m for name, m in model.model.named_modules(prefix="model") if hasattr(m, "in_features")}


def record(directory: Path) -> None:
    """Write what every linear layer gets and gives in transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    seen, given = {}, {}

    def keep(name: str, x: Tensor, y: Tensor) -> None:
        seen[name], given[name] = x[0], y[0]

    for name, module in linears(model).items():
        module.register_forward_hook(lambda _, x, y, name=name: keep(name, x[0], y))
    with torch.no_grad():
        model(torch.arange(7)[None] * 31)
    fused = {
        f"{name.rpartition('.')[0]}.{own}": seen[name] for name in seen for own, p in FUSED.items() if name.endswith(p)
    }
    torch.save(seen | fused, directory / "inputs.pt")
    torch.save(given, directory / "given.pt")


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model, computed by transformers here and by vLLM on one and on two ranks."""
    folder = tmp_path_factory.mktemp("served")
    written = {name: write(served, folder / served.folder) for name, served in SERVED.items()}
    for directory in written.values():
        record(directory)
    for world in WORLDS:
        ranks.serve(world, folder, list(written.values()))
    return written


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("served", SERVED.values(), ids=SERVED)
def test_every_linear_layer_computes_what_it_does_in_transformers(served: Served, world: int, directories):
    directory = directories[served.name]
    inputs, expected = torch.load(directory / "inputs.pt"), torch.load(directory / "given.pt")
    outputs = [torch.load(directory / f"outputs-{world}-{rank}.pt") for rank in range(world)]
    compared = set()
    for name in outputs[0]:
        parts = parts_of(name)
        found = together([output[name] for output in outputs], [expected[part] for part in parts], served)
        for part, y in zip(parts, found, strict=True):
            torch.testing.assert_close(y, expected[part], rtol=0, atol=tolerance(inputs[part], served))
            compared.add(part)
    assert compared == expected.keys()


def together(outputs: list[Tensor], whole: list[Tensor], served: Served) -> list[Tensor]:
    """Return the outputs of a fused layer's weights, joined from the ranks; each has a part of every weight."""
    if outputs[0].shape[-1] == sum(y.shape[-1] for y in whole):
        assert all(torch.equal(outputs[0], output) for output in outputs)  # summed over the ranks
        return list(outputs[0].split([y.shape[-1] for y in whole], -1))
    head = served.config.hidden_size // served.config.num_attention_heads
    sizes = [max(y.shape[-1] // len(outputs), head if len(whole) == 3 else 1) for y in whole]
    found = zip(*(output.split(sizes, -1) for output in outputs), strict=True)
    # Fewer key heads than ranks: every rank has the same one.
    return [torch.cat(parts[: y.shape[-1] // size], -1) for parts, y, size in zip(found, whole, sizes, strict=True)]


def tolerance(x: Tensor, served: Served) -> float:
    """Return a bound on the difference: float32 sums in another order, and where x is quantised, a scale per rank.

    Weights are drawn with deviation 0.02, so their sums of magnitudes stay below 0.03 K.
    """
    k = x.shape[-1]
    largest = float(x.abs().max())
    order = k * 2**-24 * largest * 0.03 * k
    return order + (2 * largest / 254 * 0.03 * k if served.rounds else 0)


def test_vllm_finds_the_plugin_and_may_register_it_again():
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "semisparse"]
    from vllm.model_executor.layers.quantization import get_quantization_config

    ranks.prepare()
    for _ in range(2):
        found.load()()
    assert get_quantization_config("semisparse").__name__ == "SemisparseVllmConfig"


@pytest.mark.usefixtures("group")
def test_a_fused_layer_traces_to_one_graph_for_any_number_of_tokens(tmp_path: Path):
    model = ranks.load(write(SERVED["searched"], tmp_path / "model"))
    layer = ranks.layers_of(model)["model.layers.0.self_attn.qkv_proj"]
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend=keep, dynamic=True)
    for m in (2, 3, 65):
        x = torch.randn(m, 256)
        assert torch.equal(compiled(x), layer(x)[0])
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if "semisparse" in str(node.target)]
    assert called == ["semisparse.linear"] * 3


@pytest.mark.usefixtures("group")
def test_weights_of_one_pattern_become_one_product(tmp_path: Path):
    model = ranks.load(write(SERVED["bitmask-32:64"], tmp_path / "model"))
    assert [len(layer.stacked.layers) for layer in ranks.layers_of(model).values()] == [1] * 4
    assert not [name for name, p in model.named_parameters() if not p.numel()]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str, tmp_path: Path):
    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    wanted = getattr(torch, dtype)
    packed = sparse_layers(AutoModelForCausalLM.from_pretrained(directory))["model.layers.0.mlp.down_proj"]
    layer = ranks.layers_of(ranks.load(directory, dtype))["model.layers.0.mlp.down_proj"]
    x = torch.randn(5, 512).to(wanted)
    assert torch.equal(layer(x)[0], packed(x))


@pytest.mark.usefixtures("group")
def test_a_fused_layer_of_which_only_a_part_is_compressed_is_refused(tmp_path: Path):
    directory = write(Served("partly", "bitmask", one("32:64"), dense=("k_proj",)), tmp_path / "model")
    with pytest.raises(InputError, match=r"of which only .*q_proj, .*v_proj are compressed"):
        ranks.load(directory)


@pytest.mark.usefixtures("group")
def test_a_compressed_head_is_refused():
    from vllm.config import VllmConfig, set_current_vllm_config

    from semisparse.integrations.vllm import SemisparseVllmConfig

    config = SemisparseVllmConfig({"lm_head": None})
    with set_current_vllm_config(VllmConfig()):
        with pytest.raises(InputError, match="not the LM head: add it to the recipe's ignore list"):
            config.get_quant_method(torch.nn.Module(), "lm_head")
        assert config.get_quant_method(torch.nn.Module(), "model.embed_tokens") is None


@pytest.mark.usefixtures("group")
def test_the_attention_is_chosen_once_before_any_layer_s_even_if_the_first_layers_are_dense(monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config

    from semisparse.integrations.vllm import SemisparseVllmConfig

    chosen: list[VllmConfig] = []
    monkeypatch.setattr("semisparse.integrations.vllm.config.choose_attention", chosen.append)
    config, current = SemisparseVllmConfig({"model.layers.1.mlp.down_proj": None}), VllmConfig()
    with set_current_vllm_config(current):
        for name in ("model.embed_tokens", "model.layers.0.self_attn.attn"):
            assert config.get_quant_method(torch.nn.Module(), name) is None
    assert chosen == [current]


LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors[f"{LAYER}.masks"][5].bitwise_xor_(1), f"layer {LAYER}: tensor masks"),
        (lambda tensors: tensors.pop(f"{LAYER}.masks"), f"layer {LAYER}: the checkpoint lacks tensors masks"),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0.self_attn.k_proj" in name],
            "k_proj: the checkpoint lacks tensors masks, values",
        ),
        (lambda tensors: tensors.update({f"{LAYER}.masks": tensors[f"{LAYER}.masks"][1:].clone()}), "is torch.int64"),
    ],
    ids=["a bit", "a tensor", "a weight of a fused layer", "a shape"],
)
def test_a_corrupted_checkpoint_is_refused(change, sentence: str, tmp_path: Path):
    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=sentence):
        ranks.load(directory)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda block: block.update(version=99), "checkpoint version 99 is unknown"),
        (lambda block: block["layers"][LAYER].update(version=99), f"{LAYER}.*version 99"),
    ],
    ids=["of the directory", "of a format"],
)
def test_an_unknown_version_is_refused_before_weights_are_loaded(change, sentence: str, tmp_path: Path):
    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    change(config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match=sentence):
        ranks.load(directory)


@pytest.mark.usefixtures("group")
def test_a_gpu_without_the_kernels_instructions_is_refused_before_weights_are_loaded(tmp_path: Path, monkeypatch):
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    (directory / "model.safetensors").unlink()
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: DeviceCapability(7, 5))
    with pytest.raises(ValueError, match=r"not supported for the current GPU\. Minimum capability: 80\. Current .* 75"):
        ranks.load(directory)


RAGGED = LlamaConfig(**{**SIZES, "intermediate_size": 400})


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("served", "layer", "columns", "reason"),
    [
        (Served("window", "slide24", one("4:6")), "o_proj", 128, "inside a window of 6 columns"),
        (Served("rows", "slide24", one("6:8"), {"kind": "int8"}, RAGGED), "down_proj", 200, "400 columns share a"),
        (Served("rows8", "slide24", one("6:8"), {"kind": "fp8"}, RAGGED), "down_proj", 200, "400 columns share a"),
        (Served("blocks", "bitmask", one("32:64"), {"kind": "w4"}, RAGGED), "down_proj", 200, "64 columns share a"),
    ],
    ids=lambda value: value.name if isinstance(value, Served) else "",
)
def test_a_cut_that_no_format_can_make_is_refused_before_weights_are_loaded(
    served: Served, layer: str, columns: int, reason: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if served.name == "window" and not rank:
        pytest.skip("the first rank's part begins with a window")
    directory = write(served, tmp_path / "model")
    (directory / "model.safetensors").unlink()
    for name, value in (("get_tensor_model_parallel_world_size", 2), ("get_tensor_model_parallel_rank", rank)):
        monkeypatch.setattr(f"vllm.model_executor.layers.linear.{name}", lambda value=value: value)
    cut = rf"columns {rank * columns} to {(rank + 1) * columns}"
    with pytest.raises(InputError, match=rf"{layer} on 2 tensor-parallel ranks: cannot slice {cut} .*{reason}"):
        ranks.load(directory)


def gpu_with(memory: int, capability: tuple[int, int] = (8, 0)) -> SimpleNamespace:
    """What the adapter asks vLLM about a GPU."""
    found = SimpleNamespace(major=capability[0], minor=capability[1])
    return SimpleNamespace(
        is_cuda=lambda: True,
        get_device_total_memory=lambda: memory,
        get_device_capability=lambda: found,
        pass_key="pass",
    )


@pytest.mark.usefixtures("group")
def test_more_than_the_memory_is_refused_before_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    (directory / "model.safetensors").unlink()
    monkeypatch.setattr("semisparse.integrations.vllm.config.current_platform", gpu_with(100_000))
    with pytest.raises(
        InputError, match=r"take 0.0 GB on each of 1 GPUs, and vLLM may use 0\.0 of 0\.0 GB .*utilization"
    ):
        ranks.load(directory)


def test_a_kv_cache_of_a_given_size_is_subtracted_from_the_memory(monkeypatch: pytest.MonkeyPatch):
    from semisparse.integrations.vllm import SemisparseVllmConfig

    monkeypatch.setattr("semisparse.integrations.vllm.config.current_platform", gpu_with(10**9))
    cache = SimpleNamespace(gpu_memory_utilization=0.1, kv_cache_memory_bytes=4 * 10**8)
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
    given = SimpleNamespace(
        parallel_config=parallel, cache_config=cache, model_config=SimpleNamespace(dtype=torch.float16)
    )

    def check(size: int) -> None:
        weight = torch.empty(size // 2, 1, dtype=torch.float16, device="meta")
        SemisparseVllmConfig({"layer": Packed.of_dense(weight)})._check_memory(given)

    check(2 * 6 * 10**8)
    with pytest.raises(
        InputError, match=r"take 0\.6 GB on each of 2 GPUs, and vLLM may use 0\.6 of 1\.0 GB .*kv-cache"
    ):
        check(2 * 6 * 10**8 + 2)
    cache.kv_cache_memory_bytes = None
    with pytest.raises(InputError, match=r"vLLM may use 0\.1 of 1\.0 GB for them \(--gpu-memory-utilization\)"):
        check(10**9)


def test_tensors_that_only_a_hopper_gpu_has_are_counted_there(monkeypatch: pytest.MonkeyPatch):
    """ec_csr: on Hopper, mask tiles beside the lists."""
    from semisparse.integrations.vllm import SemisparseVllmConfig

    mask = parse_pattern("70%").mask(torch.rand(256, 256))
    packed = semisparse.pack(torch.randn(256, 256).half() * mask, format="ec_csr", pattern="70%")
    given = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(gpu_memory_utilization=1.0, kv_cache_memory_bytes=None),
        model_config=SimpleNamespace(dtype=torch.float16),
    )
    for capability, most in (((8, 0), packed.nbytes), ((9, 0), bytes_on_gpu(packed))):
        for memory in (most, most - 1):
            gpu = gpu_with(memory, capability)
            monkeypatch.setattr("semisparse.integrations.vllm.config.current_platform", gpu)
            refused = nullcontext() if memory == most else pytest.raises(InputError, match="the compressed layers take")
            with refused:
                SemisparseVllmConfig({"layer": packed})._check_memory(given)
    assert bytes_on_gpu(packed) > packed.nbytes


def copied(*patterns: str) -> dict[str, list[str]]:
    return {"semisparse_keep_dense": list(patterns)}


@pytest.mark.usefixtures("group")
def test_layers_with_dense_copies_compute_the_same(tmp_path: Path):
    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    plain = ranks.layers_of(ranks.load(directory))
    layers = ranks.layers_of(ranks.load(directory, additional_config=copied("*.o_proj", "*.gate_proj", "*.up_proj")))
    x = torch.randn(MANY_TOKENS[0], 256)
    for name, layer in layers.items():
        (stacked,) = layer.stacked.layers
        is_copied = isinstance(stacked, CopiedLinear)
        assert is_copied is name.endswith(("o_proj", "gate_up_proj"))
        if is_copied:
            torch.testing.assert_close(layer(x)[0], plain[name](x)[0], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (copied("*.o_proj", "lm_head"), r"has lm_head, which matches no compressed layer; .* model\.layers\.0\."),
        (copied("*.q_proj"), r"of which semisparse_keep_dense matches only .*q_proj: match all or none"),
        ({"semisparse_keep_dense": "*"}, r"semisparse_keep_dense is '\*', expected a list of patterns"),
        ({"semisparse_keep_dense": [1]}, r"semisparse_keep_dense is \[1\], expected a list of patterns"),
    ],
)
def test_wrong_settings_of_dense_copies_are_refused(setting: dict[str, object], sentence: str, tmp_path: Path):
    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    (directory / "model.safetensors").unlink()
    with pytest.raises(InputError, match=sentence):
        ranks.load(directory, additional_config=setting)


@pytest.mark.usefixtures("group")
def test_dense_copies_count_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    (directory / "model.safetensors").unlink()
    monkeypatch.setattr("semisparse.integrations.vllm.config.current_platform", gpu_with(2_000_000))
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        ranks.load(directory)
    with pytest.raises(InputError, match=r"the compressed layers and their dense copies take 0\.0 GB on each"):
        ranks.load(directory, additional_config=copied("*"))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("lora", "serve without --enable-lora, or merge"),
        ("dummy", "--load-format dummy: packed layers are loaded from the tensors"),
        ("sharded_state", "--load-format sharded_state: packed layers"),
        ("uva", "packed layers stay on the GPU: serve without --cpu-offload-gb"),
        ("prefetch", "packed layers stay on the GPU: serve without --cpu-offload-gb"),
        ("invariant", "VLLM_BATCH_INVARIANT=1: packed matmuls"),
        ("mistyped", "semisparse_fusoin is unknown, expected semisparse_attention, semisparse_fusion"),
    ],
)
def test_options_that_packed_layers_do_not_follow_are_refused_before_weights_are_loaded(
    option: str, sentence: str, monkeypatch: pytest.MonkeyPatch
):
    from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config

    from semisparse.integrations.vllm import SemisparseVllmConfig

    config = VllmConfig()
    if option == "lora":
        config.lora_config = LoRAConfig(max_lora_rank=16, max_loras=1)
    elif option == "uva":
        config.offload_config.uva.cpu_offload_gb = 1
    elif option == "prefetch":
        config.offload_config.prefetch.offload_group_size = 2
    elif option == "mistyped":
        config.additional_config = {"semisparse_fusoin": False, "another plugin's": 1}
    elif option == "invariant":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        monkeypatch.setattr("semisparse.integrations.vllm.settings.current_platform", gpu_with(10**9))
    else:
        config.load_config.load_format = option
    with set_current_vllm_config(config), pytest.raises(InputError, match=sentence):
        SemisparseVllmConfig({})._checked_tokens()


@pytest.mark.usefixtures("group")
def test_weights_are_not_loaded_a_second_time(tmp_path: Path):
    """vLLM reloads them after its deeper sleep, and where a trainer sends new ones."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    directory = write(SERVED["bitmask-32:64"], tmp_path / "model")
    model = ranks.load(directory)
    initialize_layerwise_reload(model)
    with pytest.raises(InputError, match=r"model\.layers\.0\..*cannot be loaded again into a running vLLM"):
        model.load_weights(load_file(directory / "model.safetensors").items())


@pytest.mark.usefixtures("group")
def test_code_compiled_for_other_formats_is_not_taken_for_a_directory_written_anew(tmp_path: Path):
    from vllm.config import ModelConfig

    hashes = set()
    for name in ("bitmask-32:64", "searched"):
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        hashes.add(ModelConfig(model=str(write(SERVED[name], tmp_path / "model")), dtype="float32").compute_hash())
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("changes", "is_taken"),
    [
        ({}, True),
        ({"wanted": False}, False),
        ({"wanted": None}, True),
        ({"backend": "TRITON_ATTN"}, False),
        ({"capability": (8, 0)}, False),
        ({"dtype": torch.float32}, False),
        ({"use_mla": True}, False),
        ({"head": 512}, False),
        ({"cache_dtype": "fp8"}, False),
        ({"path": "other.Backend"}, False),
    ],
    ids=str,
)
def test_the_attention_backend_is_taken_where_vllm_would_take_flash_attention(changes, is_taken, monkeypatch):
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum

    from semisparse.integrations.vllm import attention

    custom = AttentionBackendEnum.CUSTOM
    given = {"wanted": True, "backend": None, "capability": (9, 0), "dtype": torch.bfloat16, "use_mla": False}
    given |= {"head": 128, "cache_dtype": "auto", "path": attention.BACKEND, **changes}
    monkeypatch.setitem(_ATTN_OVERRIDES, custom, given["path"])
    monkeypatch.setattr(attention, "current_platform", gpu_with(1, given["capability"]))
    config = SimpleNamespace(
        additional_config={} if given["wanted"] is None else {"semisparse_attention": given["wanted"]},
        attention_config=SimpleNamespace(backend=given["backend"]),
        cache_config=SimpleNamespace(cache_dtype=given["cache_dtype"]),
        model_config=SimpleNamespace(
            dtype=given["dtype"],
            use_mla=given["use_mla"],
            is_mm_prefix_lm=False,
            is_encoder_decoder=False,
            get_head_size=lambda: given["head"],
        ),
    )
    assert attention.choose_attention(config) is is_taken
    assert config.attention_config.backend == (custom if is_taken else given["backend"])


def test_the_sizes_divide_over_two_ranks():
    assert not [key for key in ("hidden_size", "intermediate_size", "num_attention_heads") if SIZES[key] % 2]


def test_the_attention_backend_is_registered_by_name_unless_another_plugin_has_one(monkeypatch):
    import vllm
    from vllm.v1.attention.backends import registry

    from semisparse.integrations.vllm import register

    custom, overrides = registry.AttentionBackendEnum.CUSTOM, {}
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", overrides)
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    register()
    assert not custom.is_overridden()  # FlashAttention's interface is another there
    monkeypatch.setattr(vllm, "__version__", "0.24.0")
    register()
    assert overrides == {custom: "semisparse.api.vllm_attention.DecodeAttentionBackend"}
    overrides[custom] = "other.Backend"
    register()
    assert overrides == {custom: "other.Backend"}
