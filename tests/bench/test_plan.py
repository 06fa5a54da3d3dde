"""The roofline model against arithmetic by hand, and the sentences of a plan."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from semisparse.bench import machines, shapes
from semisparse.bench.machines import Machine, find_machine
from semisparse.bench.plan import make_plan
from semisparse.bench.roofline import Candidate, candidates, estimate, estimate_matmul, problem_for, random_weight
from semisparse.bench.shapes import ARCHITECTURES, LayerShape, architecture, layer_shapes
from semisparse.errors import InputError, PatternError
from semisparse.formats import Format, Pass, get_format, registry
from semisparse.formats.tuned import SHIPPED, read_table
from semisparse.patterns import parse_pattern
from tests.architectures import CONFIGS

MODELS = Path(__file__).parents[2] / "../shared/models"

RESULTS = Path(__file__).parents[2] / "results/h200"

TOY = Machine("toy", "invented", 1e12, {"tensor fp16": 1e14, "fp32": 1e13}, 1e-6)

SQUARE = [LayerShape("", 4096, 4096, 1)]


def test_a_pass_takes_the_larger_of_its_two_times():
    found = estimate([Pass(2e6, 1e8, "tensor fp16"), Pass(1e6, 3e8, "tensor fp16")], TOY)
    assert found.floor_seconds == pytest.approx(2e-6 + 3e-6)
    assert found.seconds == pytest.approx(7e-6)
    assert (found.bytes, found.operations, found.bound) == (3e6, 4e8, "arithmetic")
    assert estimate([Pass(4e6, 1e8, "tensor fp16")], TOY).bound == "memory"
    assert estimate([Pass(1e5, 0, "no unit")], TOY).bound == "fixed time"


def test_unpacking_and_the_fraction_reached_are_predicted_but_not_in_the_floor():
    found = estimate([Pass(1e6, 1e8, "tensor fp16", unpacking=5e7), Pass(1e6, 3e8, "tensor fp16", reached=0.5)], TOY)
    assert found.floor_seconds == pytest.approx(1e-6 + 3e-6)
    assert found.seconds == pytest.approx(5e-6 + 6e-6 + 2e-6)
    assert found.bound == "arithmetic"
    assert estimate([Pass(1e6, 0, "fp32", unpacking=5e7)], TOY).bound == "unpacking"
    assert estimate([Pass(9e6, 0, "fp32", unpacking=5e7)], TOY).bound == "memory"
    with pytest.raises(InputError, match="toy has no known rate for fp32"):
        estimate([Pass(1, 0, "fp32", unpacking=1)], replace(TOY, peaks={}))


def test_strategies_are_passed_on():
    passes = [Pass(1, 0, "fp32"), Pass(1, 1, "fp32", "folding"), Pass(1, 1, "fp32", "stacking")]
    assert estimate(passes, TOY).strategy == "folding; stacking"
    compared = candidates(["vector_nm"], ["16:32v32", "2:32v32"])
    rows = [row.as_dict() for row in make_plan(SQUARE, [4096], compared, torch.float32, find_machine("h200")).rows]
    assert [row["strategy"].split(",")[0] for row in rows] == ["", "non-packing", "packing"]


def test_a_unit_that_a_machine_lacks_is_named():
    with pytest.raises(InputError, match="toy has no known rate for tensor fp8"):
        estimate([Pass(1, 1, "tensor fp8")], TOY)


def test_the_dense_matmul_by_hand():
    found, bits = estimate_matmul(candidates([])[0], 8, 1024, 512, torch.bfloat16, TOY)
    assert bits == 16
    assert found.bytes == 2 * (1024 * 512 + 8 * 512 + 8 * 1024)
    assert found.operations == 2 * 8 * 1024 * 512


@pytest.mark.parametrize("form", [pytest.param(form, id=name) for name, form in registry().items()])
def test_the_predicted_bytes_are_those_packed(form: Format):
    """The bytes of all rows are predicted from a sample of them."""
    for candidate in candidates([form.name], ["32:64", "50%", "8:32v32"]):
        if candidate.format != form.name:
            continue
        n, k = 1024, 640
        _, predicted = problem_for(candidate, 1, n, k, torch.float16, "cpu")
        pattern = parse_pattern(candidate.pattern)
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(7))
        packed = form.pack((weight * pattern.mask(weight.abs())).half(), pattern, **candidate.options)
        # The number of non-zeros in a sample of rows varies where the pattern counts over the whole matrix.
        assert predicted == pytest.approx(packed.nbytes, rel=0.02)


def test_candidates_are_the_recipes_patterns_or_those_asked_for():
    found = candidates()
    assert found[0].is_baseline
    assert Candidate("bitmask", "32:64") in found
    assert {c.pattern for c in candidates(["bitmask"], ["4:8", "50%"])} == {"0%", "4:8", "50%"}
    assert sum(c.is_baseline for c in candidates(["dense", "bitmask"])) == 1
    with pytest.raises(InputError, match="unknown format"):
        candidates(["abacus"])
    with pytest.raises(PatternError):
        candidates(patterns=["much"])


def test_sentences_state_when_sparsity_pays_and_when_not():
    compared = candidates(["bitmask"], ["32:64"])[:2]
    one, many = make_plan(SQUARE, [1, 4096], compared, torch.bfloat16, find_machine("h200")).sentences()
    assert one.startswith("M = 1: the dense matmul is bound by reading the weights; bitmask 32:64 may be up to 1.")
    assert "M = 4,096: the dense matmul is bound by arithmetic; sparsity will not pay" in many
    assert many.endswith("Keep it dense.")
    tiny = make_plan([LayerShape("", 64, 64, 1)], [1], compared, torch.bfloat16, find_machine("h200")).sentences()
    assert "fixed time; sparsity will not pay" in tiny[0]
    alone = make_plan(SQUARE, [1], candidates([]), torch.bfloat16, find_machine("h200")).sentences()
    assert "no sparse format" in alone[0]


def test_a_sentence_names_layers_that_gain_at_no_number_of_tokens():
    layers = [LayerShape("small", 64, 64, 1), LayerShape("large", 8192, 8192, 1)]
    sentences = make_plan(layers, [1, 16], candidates(["bitmask"])[:2], torch.bfloat16, TOY).sentences()
    assert sentences[-1] == "bitmask 32:64 gains no speed here at any of these numbers of tokens: small 64,64."
    (large, _) = make_plan(layers[1:], [1, 4096], candidates(["bitmask"])[:2], torch.bfloat16, TOY).sentences()
    assert "at any of these" not in large


def test_sentences_name_the_speed_up_of_quantised_dense_layers():
    plan = make_plan(SQUARE, [4096], candidates(["dense", "slide24"]), torch.bfloat16, find_machine("h200"))
    gains = {label: gain for (_, label), (_, gain) in plan.totals().items()}
    assert f"dense fp8 up to {gains['dense fp8']:.2f} without zeros." in plan.sentences()[0]


def test_dense_weights_in_groups_are_not_called_sparse():
    compared = [*candidates(["bitmask"], ["32:64"])[:2], Candidate("gqs", "g128@0%", {"kind": "w2"})]
    plan = make_plan(SQUARE, [1], compared, torch.bfloat16, find_machine("h200"))
    (sentence,) = plan.sentences()
    gain = plan.totals()[1, "gqs w2 g128@0%"][1]
    assert "; bitmask 32:64 may be up to" in sentence
    assert f"gqs w2 g128@0% up to {gain:.2f} without zeros." in sentence


@pytest.mark.parametrize(
    ("kind", "size", "dtype", "passes"),
    [
        ("w3", 16, torch.float16, (1, 1, 2)),
        ("w4", 16, torch.float16, (1, 1, 2)),
        ("w4", 8, torch.bfloat16, (1, 1, 2)),
        ("w4a8", 16, torch.float16, (1, 2, 3)),  # x is quantised in the kernel, or before it
        ("w4a8", 32, torch.float16, (2, 2, 3)),
        ("w4", 4, torch.float16, (2, 2, 2)),
        ("w4", 16, torch.float32, (2, 2, 2)),
    ],
)
def test_groups_are_planned_as_their_kernels_take_them(kind: str, size: int, dtype: torch.dtype, passes: tuple):
    """For 1, 96 and 4,096 tokens; where no kernel reads packed groups, the weight is unpacked first."""
    candidate = Candidate("gqs", f"g{size}@50%", {"kind": kind})
    for m, count in zip((1, 96, 4096), passes, strict=True):
        problem, nbytes = problem_for(candidate, m, 4096, 4096, dtype, "cuda")
        assert len(get_format("gqs").cost(problem, nbytes)) == count
    problem, nbytes = problem_for(candidate, 1, 4096, 4096, dtype, "cuda")
    on_cpu = get_format("gqs").cost(replace(problem, device=torch.device("cpu")), nbytes)
    assert len(on_cpu) == (2 if kind == "w4a8" else 1)


def test_a_format_that_computes_less_may_pay_where_arithmetic_binds(monkeypatch):
    """The format's cost decides: half the operations are twice as fast."""

    def half(problem, weight_bytes):
        return (Pass(weight_bytes, problem.m * problem.n * problem.k, "tensor fp16"),)

    bitmask = get_format("bitmask")
    monkeypatch.setitem(bitmask.__dict__, "cost", half)
    plan = make_plan(SQUARE, [4096], candidates(["bitmask"]), torch.bfloat16, TOY)
    assert "bitmask 32:64 may be up to 2.00 times as fast" in plan.sentences()[0]


def test_a_measured_speed_up_replaces_the_predicted_one(tmp_path, monkeypatch):
    """The shipped table of the H200 has measurements; for a GPU without a table the prediction does not use them."""
    monkeypatch.setenv("SEMISPARSE_CACHE", str(tmp_path))
    layers = [LayerShape("", 28672, 8192, 1)]
    shown = [Candidate("dense", "0%"), Candidate("gqs", "g16@50%", {"kind": "w4"})]
    (row,) = (
        one
        for one in read_table(SHIPPED / "nvidia-h200.csv")
        if (one.pattern, one.n, one.k, one.m) == ("g16@50%", 28672, 8192, 1)
        and (one.kernel, one.dtype) == ("decode", "bfloat16")
    )
    dense, here = make_plan(layers, [1], shown, torch.bfloat16, find_machine("h200")).rows
    assert here.estimate.measured
    assert not dense.estimate.measured
    assert here.speedup == pytest.approx(row.dense_us / row.us)
    assert here.as_dict()["us"] == pytest.approx(dense.as_dict()["us"] * row.us / row.dense_us)
    assert not any(
        one.estimate.measured for one in make_plan(layers, [1], shown, torch.bfloat16, find_machine("a100")).rows
    )
    (_, large) = make_plan(layers, [100_000], shown, torch.bfloat16, find_machine("h200")).rows
    assert not large.estimate.measured


def test_totals_count_every_layer():
    layers = [LayerShape("a", 256, 256, 3), LayerShape("b", 512, 256, 1)]
    plan = make_plan(layers, [1], candidates([]), torch.float16, TOY)
    by_hand = 3 * plan.rows[0].estimate.seconds + plan.rows[1].estimate.seconds
    assert plan.totals()[1, "dense"] == (pytest.approx(by_hand), 1.0)


def test_a_candidate_that_cannot_be_predicted_is_left_out_with_its_reason():
    plan = make_plan([LayerShape("", 64, 172, 1)], [1], candidates(["dense"]), torch.bfloat16, TOY)
    assert {row.candidate.label for row in plan.rows} == {"dense"}
    assert "multiples" in plan.left_out["dense int4"]
    assert "tensor int8" in plan.left_out["dense int8"]


def test_dense_stays_best_unless_clearly_beaten():
    plan = make_plan(SQUARE, [1, 4096], candidates(["bitmask"]), torch.bfloat16, find_machine("h200"))
    assert [row.candidate.label for row in plan.best().values()] == ["bitmask w4 32:64", "dense"]


@pytest.mark.parametrize("name", machines._data()["gpus"])
def test_every_gpu_has_what_a_plan_needs(name):
    gpu = machines._data()["gpus"][name]
    assert gpu["source"]
    machine = find_machine(name)
    assert machine.bandwidth < gpu["bandwidth"] * 1e12
    assert {"tensor fp16", "tensor int8", "fp32"} <= set(machine.peaks)
    assert all(machine.peaks[unit] < gpu["peaks"][unit] * 1e12 for unit in machine.peaks)
    assert make_plan(SQUARE, [1], candidates(["bitmask"]), torch.bfloat16, machine).rows


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="unknown GPU 'abacus'; known: a100"):
        find_machine("abacus")


def test_shapes_of_architectures_are_those_published():
    found = {(s.n, s.k): s.count for s in layer_shapes("llama2-7b")}
    assert found == {(4096, 4096): 128, (11008, 4096): 64, (4096, 11008): 32}
    fused = {(s.names, s.n, s.k, s.count) for s in layer_shapes("qwen2.5-7b:fused")}
    assert fused == {
        ("qkv_proj", 4608, 3584, 28),
        ("o_proj", 3584, 3584, 28),
        ("gate_up_proj", 37888, 3584, 28),
        ("down_proj", 3584, 18944, 28),
    }


def test_experts_count_by_how_many_of_them_the_tokens_use():
    """Qwen3-30B-A3B: 48 layers of 128 experts, 8 per token; 64 tokens use 126 of them."""
    found = layer_shapes("qwen3-30b-a3b")
    experts = {s.names: s for s in found if s.experts > 1}
    assert {(s.names, s.n, s.k, s.count) for s in experts.values()} == {
        ("gate_up", 1536, 2048, 6144),
        ("down", 2048, 768, 6144),
    }
    down = experts["down"]
    assert (down.used(1), down.tokens(1)) == (pytest.approx(48 * 8), 1)
    assert (down.used(64), down.tokens(64)) == (pytest.approx(48 * 128 * (1 - 0.9375**64)), 4)
    assert down.tokens(4096) == 256
    (attention,) = (s for s in found if s.names == "o_proj")
    assert (attention.used(5), attention.tokens(5)) == (48, 5)

    dense, sparse = make_plan([down], [1], candidates(["bitmask"])[:2], torch.bfloat16, TOY).rows
    alone, _ = estimate_matmul(dense.candidate, 1, 2048, 768, torch.bfloat16, TOY)
    assert dense.estimate.seconds == pytest.approx(alone.seconds - TOY.kernel_seconds * 7 / 8)
    alone, _ = estimate_matmul(sparse.candidate, 1, 2048, 768, torch.bfloat16, TOY)
    assert sparse.estimate.seconds == pytest.approx(alone.seconds - TOY.kernel_seconds * 7 / 8)
    totals = make_plan([down], [1], candidates(["bitmask"])[:2], torch.bfloat16, TOY).totals()
    assert totals[1, "bitmask 32:64"][0] == pytest.approx(48 * 8 * sparse.estimate.seconds)


@pytest.mark.parametrize(("form", "device"), [("ec_csr", "cuda"), ("bitmask", "cpu")])
def test_experts_without_a_kernel_for_all_have_a_launch_each(form, device):
    (down,) = (s for s in layer_shapes("qwen3-30b-a3b") if s.names == "down")
    machine = replace(TOY, device=device)
    dense, other = make_plan([down], [1], candidates([form])[:2], torch.bfloat16, machine).rows
    alone, _ = estimate_matmul(other.candidate, 1, 2048, 768, torch.bfloat16, machine)
    assert dense.candidate.is_baseline
    assert other.estimate.seconds == alone.seconds


@pytest.mark.parametrize("name", ["LLaVA", "Gemma-3"])
def test_of_a_multimodal_model_the_text_decoder_is_planned(name, tmp_path):
    family, settings = CONFIGS[name]
    CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path)
    names = {name for s in layer_shapes(str(tmp_path)) for name in s.names.split(", ")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("name", ["T5", "BERT", "Mamba"])
def test_what_compress_refuses_is_refused_in_a_sentence(name, tmp_path):
    family, settings = CONFIGS[name]
    CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{family} is not supported; plan takes decoder-only"):
        layer_shapes(str(tmp_path))


def test_a_mixture_that_hides_its_experts_per_token_is_refused(monkeypatch):
    config = architecture("mixtral-8x7b")
    config.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(shapes.AutoModelForCausalLM, "from_config", lambda *args, **kwargs: model)
    monkeypatch.setattr(type(config), "get_text_config", lambda self, **_: SimpleNamespace(num_attention_heads=32))
    with pytest.raises(InputError, match="does not say num_experts_per_tok"):
        layer_shapes("mixtral-8x7b")


# Parameters of the linear layers, in thousands of millions, as the published totals less embeddings and head give them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama2-7b", 6.476), ("llama2-70b", 68.45), ("qwen2.5-1.5b", 1.31), ("qwen3-30b-a3b", 29.91)],
)
def test_architectures_have_their_published_size(name, billions):
    total = sum(s.n * s.k * s.count for s in layer_shapes(name))
    assert total / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_plain_shape_and_a_bad_one():
    assert layer_shapes("12,34") == [LayerShape("", 12, 34, 1)]
    with pytest.raises(InputError, match="N, K = 2147483648, 1: expected at most 1048576"):
        layer_shapes("2147483648,1")
    with pytest.raises(InputError, match="expected N,K, a directory"):
        layer_shapes("llama9-7b")
    assert "llama2-7b" in ARCHITECTURES


@pytest.mark.skipif(not MODELS.is_dir(), reason="../shared/models is absent")
def test_shapes_of_a_checkpoint_leave_the_head_out():
    found = {(s.names, s.n, s.k, s.count) for s in layer_shapes(str(MODELS / "pycode-11m"))}
    assert found == {
        ("q_proj, o_proj", 384, 384, 12),
        ("k_proj, v_proj", 128, 384, 12),
        ("gate_proj, up_proj", 1024, 384, 12),
        ("down_proj", 384, 1024, 6),
    }


def test_a_directory_whose_config_is_broken_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json is unreadable"):
        layer_shapes(str(tmp_path))


@pytest.mark.parametrize("form", ["bitmask", "dense", "gqs", "slide24", "vector_nm"])
def test_the_predicted_bytes_of_rows_that_fill_no_tile_are_enough(form: str):
    """128 rows and the rest are sampled apart. In proportion, 168 rows would be 10.5 tiles of 16, not 11."""
    for candidate in (candidate for candidate in candidates([form]) if candidate.format == form):
        for n in (168, 296):
            _, predicted = problem_for(candidate, 1, n, 128, torch.float16, "cpu")
            weight = random_weight(parse_pattern(candidate.pattern), n, 128, torch.float16, "cpu")
            packed = get_format(form).pack(weight, candidate.pattern, **candidate.options)
            assert packed.nbytes <= predicted <= 1.01 * packed.nbytes, candidate.label
