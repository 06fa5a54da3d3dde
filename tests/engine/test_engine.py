"""The engine generates what transformers generates, for structures that it knows and for others."""

import warnings

import pytest
import torch
from transformers import PreTrainedModel

from semisparse.engine import Engine, Sampling, backend
from semisparse.engine.backend import DecoderBackend
from semisparse.engine.speculation import Verifier, look_up, speculated
from semisparse.engine.transformers_backend import TransformersBackend
from semisparse.errors import InputError, SemisparseError
from tests.models import SHARED, byte_tokenizer, random_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LLAMA_LIKE = ("llama", "llama-bias", "llama-tied", "qwen2", "qwen3")
OTHERS = ("opt", "gpt2", "mistral")  # this mistral attends to a sliding window
HEADS = {"head_dim": 8}
"""Settings that the kernels support; families without a setting ignore it."""
PROMPTS = ("def f(x):", "a", "The quick brown fox")


def greedy(model: PreTrainedModel, prompt: str, new: int) -> str:
    tokenizer = byte_tokenizer()
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    found = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
    return tokenizer.decode(found[0], skip_special_tokens=True)


def engine_of(model: PreTrainedModel) -> Engine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Engine(model, byte_tokenizer())


@pytest.fixture(scope="module")
def llama() -> Engine:
    return engine_of(random_model("llama", torch.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*LLAMA_LIKE, *OTHERS])
def test_greedy_text_is_that_of_transformers(name: str, device: str):
    model = random_model(name, torch.float32, **HEADS).to(device)
    expected = [greedy(model, prompt, 24) for prompt in PROMPTS]
    engine = engine_of(model)
    assert isinstance(engine.backend, DecoderBackend if name in LLAMA_LIKE else TransformersBackend)
    assert (engine.note is None) == (name in LLAMA_LIKE)
    found = engine.generate(PROMPTS, 24)
    assert [one.text for one in found] == expected
    assert [engine.generate([prompt], 24)[0].text for prompt in PROMPTS] == expected
    assert [one.text for one in engine.generate(PROMPTS, 24, proposals=4)] == expected


@pytest.mark.skipif(not SHARED.is_dir(), reason="real models are in ../shared: it is absent")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["stories260k", pytest.param("pycode-11m", marks=pytest.mark.slow)])
def test_greedy_text_of_trained_models(name: str, device: str):
    dtype = torch.float32
    engine = Engine(SHARED / "models" / name, device=device, dtype=dtype)
    prompts = ["Once upon a time there was", "The", "def main(args):\n"]
    found = engine.generate(prompts, 40)
    for prompt, one in zip(prompts, found, strict=True):
        ids = engine.tokenizer(prompt, return_tensors="pt").input_ids.to(device)
        expected = engine.model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
        assert one.text == engine.tokenizer.decode(expected[0], skip_special_tokens=True)
    assert [one.text for one in engine.generate(prompts, 40, proposals=6)] == [one.text for one in found]


def test_a_model_that_only_looks_like_llama_is_not_taken_for_one():
    model = random_model("llama", torch.float32)
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: 2 * forward(x)
    engine = engine_of(model)
    assert "logits differ from" in str(engine.note)
    assert engine.generate(["abc"], 8)[0].text == greedy(model, "abc", 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU the engine takes any: no GPU here")
def test_heads_that_no_kernel_takes_run_through_transformers():
    model = random_model("llama", torch.float32, head_dim=6).cuda()
    engine = engine_of(model)
    assert "heads have 6 values" in str(engine.note)
    assert engine.generate(["abc"], 8)[0].text == greedy(model, "abc", 8)


@pytest.mark.parametrize("allocating", ["needs", "compile", "run"])
def test_a_full_gpu_is_one_sentence(allocating: str, llama: Engine, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr(llama, "_warm", set())
    monkeypatch.setattr(llama.backend, allocating, full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (10**9, 80 * 10**9))
    with pytest.raises(SemisparseError, match=r"memory is full: 1.0 of 80.0 GB are free"):
        llama.generate(["abc"], 5)


@pytest.mark.parametrize(("free", "fitting"), [(5, "4 such sequences"), (1, "1 such sequence "), (0, "not even one")])
def test_a_batch_whose_cache_does_not_fit_is_refused(free: int, fitting: str, monkeypatch: pytest.MonkeyPatch):
    """Five prompts are padded to eight sequences on a GPU; room for five is room for a batch of four."""
    engine = engine_of(random_model("llama", torch.float32))
    heads, layers = engine.backend.decoder.structure.heads, len(engine.backend.decoder.layers)
    of_one = 2 * layers * heads.kv_count * 64 * heads.dim * 4
    monkeypatch.setattr(engine.backend, "_on_gpu", True)
    monkeypatch.setattr(backend, "free_memory", lambda device: free * of_one)
    with pytest.raises(InputError, match=rf"8 sequences of 64 positions take .* of GPU memory are free: {fitting}"):
        engine.generate(["abc"] * 5, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's memory: there is no GPU")
def test_a_gpu_that_fills_after_the_check_is_one_sentence():
    """The allocator's limit stands for another process that takes the memory between the check and the allocation."""
    engine = engine_of(random_model("llama", torch.float32, **HEADS).cuda())
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(SemisparseError, match=r"the GPU's memory is full: .* take a smaller batch"):
            engine.generate(["abc"] * 4096, 32)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert engine.generate(["abc"], 8)[0].text == greedy(engine.model, "abc", 8)


def test_a_new_cache_is_never_taken_for_a_warm_one(llama: Engine):
    """A freed cache's id was reused by a later one, for which nothing had been captured."""
    seen = set()
    for turn in range(40):
        prompts = [[1]] * (1 + turn % 2)  # each call makes another cache
        needed = llama.backend.needs(prompts, 2, Sampling(), 0)
        assert needed not in seen
        seen.add(needed)


def test_what_is_measured_adds_up(llama: Engine):
    first, again = (llama.generate(PROMPTS[:2], 12)[0] for _ in range(2))
    assert first.new_tokens == 12
    assert 0 < first.first_token_seconds < first.seconds
    assert first.seconds == pytest.approx(first.first_token_seconds + first.decode_seconds)
    assert again.compile_seconds == 0
    assert first.decode_tokens_per_second == pytest.approx(11 / first.decode_seconds)
    assert llama.generate(PROMPTS[:1], 1)[0].decode_tokens_per_second is None


@pytest.mark.parametrize(("new", "proposals", "steps"), [(1, 0, 1), (24, 0, 2), (24, 4, 2)])
def test_preparing_runs_no_step_that_it_does_not_wait_for(
    new: int, proposals: int, steps: int, monkeypatch: pytest.MonkeyPatch
):
    """On a GPU a run launches steps before earlier tokens are read. A next batch's first token would wait for them."""
    engine, runs = engine_of(random_model("llama", torch.float32)), []
    run = engine.backend.run

    def recorded(prompts, new, *options):
        rows = 0
        for row in run(prompts, new, *options):
            rows += 1
            yield row
        runs.append((new, rows))

    monkeypatch.setattr(engine.backend, "run", recorded)
    engine.prepare(PROMPTS, new, proposals=proposals)
    assert runs == [(steps, steps)], "steps that were asked for, and rows that were read to the end"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU nothing runs ahead: no GPU here")
def test_preparing_leaves_the_gpu_idle():
    engine = engine_of(random_model("llama", torch.bfloat16, **HEADS, max_position_embeddings=256).cuda())
    engine.prepare(PROMPTS, 200)
    assert torch.cuda.current_stream().query()


def test_text_is_streamed_as_it_comes_and_whole_in_the_end(llama: Engine):
    parts: dict[int, list[str]] = {0: [], 1: []}
    found = llama.generate(PROMPTS[:2], 20, on_text=lambda number, text: parts[number].append(text))
    for number, prompt in enumerate(PROMPTS[:2]):
        assert prompt + "".join(parts[number]) == found[number].text


def test_end_tokens_and_stop_strings_end_a_continuation(llama: Engine, monkeypatch: pytest.MonkeyPatch):
    rows = [row[0] for row in llama.backend.run([llama.tokenizer("abc").input_ids], 30, Sampling())]
    new = llama.generate(["abc"], 30)[0].text.removeprefix("abc")
    stop = new[4:7]
    stopped = llama.generate(["abc"], 30, stop=[stop, "never reached"])[0]
    assert stopped.text == "abc" + new[: new.index(stop)]
    assert stopped.new_tokens < 30
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", [7000, rows[20]])
    assert llama.generate(["abc"], 30)[0].new_tokens == rows.index(rows[20]) + 1


def test_drawn_tokens_follow_the_seed_and_the_limits(llama: Engine):
    def text(**sampling) -> str:
        return llama.generate(["abc"], 20, sampling=Sampling(**sampling))[0].text

    assert text(temperature=1.0, seed=1) == text(temperature=1.0, seed=1) != text(temperature=1.0, seed=2)
    assert text(temperature=1.0, top_k=1) == text() == text(temperature=0.7, top_p=1e-6)


def test_drawn_tokens_have_the_probabilities_of_the_model():
    from semisparse.engine.sampling import choose

    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(0)
    for sampling, expected in (
        (Sampling(2.0), (logits[0] / 2).softmax(-1)),
        (Sampling(1.0, top_k=2), torch.tensor([-torch.inf, 1.0, 2.0, -torch.inf]).softmax(-1)),
        (Sampling(1.0, top_p=0.8), torch.tensor([-torch.inf, 1.0, 2.0, -torch.inf]).softmax(-1)),
        (Sampling(1.0, top_p=0.5), torch.tensor([0.0, 0.0, 1.0, 0.0])),
    ):
        shares = choose(logits, sampling, generator).bincount(minlength=4) / len(logits)
        assert torch.allclose(shares, expected, atol=0.02), sampling


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        (["abc"], {"max_new_tokens": 0}, "at least 1"),
        (["abc"], {"max_new_tokens": 100}, "exceed the model's context of 64"),
        (["a" * 70], {}, "exceed the model's context"),
        (["abc"], {"proposals": 4, "sampling": Sampling(1.0)}, "leave the temperature at 0"),
        (["abc"], {"proposals": 99}, "0 to 31"),
    ],
)
def test_what_cannot_be_generated_is_said(llama: Engine, prompts, options, sentence):
    with pytest.raises(InputError, match=sentence):
        llama.generate(prompts, **{"max_new_tokens": 8, **options})


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_k": -1}, {"temperature": 1.0, "top_p": 0.0}, {"top_k": 5}]
)
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(InputError):
        Sampling(**bad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("proposals", [1, 5])
def test_a_draft_model_changes_no_token(proposals: int, device: str):
    model = random_model("llama", torch.float32, **HEADS).to(device)
    expected = [greedy(model, prompt, 24) for prompt in PROMPTS]
    for draft in (model, random_model("qwen3", torch.float32, **HEADS).to(device)):
        engine = Engine(model, byte_tokenizer(), draft=draft)
        assert [one.text for one in engine.generate(PROMPTS, 24, proposals=proposals)] == expected
        assert engine.generate(PROMPTS[:1], 24, proposals=proposals)[0].text == expected[0]


def test_every_token_of_an_equal_draft_model_is_accepted(monkeypatch: pytest.MonkeyPatch):
    model = random_model("llama", torch.float32)
    engine, steps = Engine(model, byte_tokenizer(), draft=random_model("llama", torch.float32)), []
    engine.prepare(PROMPTS, 24, proposals=5)
    verify = Verifier.__call__
    monkeypatch.setattr(
        Verifier, "__call__", lambda self, tokens, first: steps.append(tokens) or verify(self, tokens, first)
    )
    engine.generate(PROMPTS, 1 + 4 * 6, proposals=5)
    assert len(steps) == 4 * (5 + 1), "steps: four times five of the draft model and one of the model, for six tokens"


def test_draft_models_that_do_not_fit_are_refused():
    model = random_model("llama", torch.float32)
    with pytest.raises(InputError, match="knows 96 tokens"):
        Engine(model, byte_tokenizer(), draft=random_model("llama", torch.float32, vocab_size=96))
    with pytest.raises(InputError, match="engine's own code"):
        Engine(model, byte_tokenizer(), draft=random_model("gpt2", torch.float32))


def test_a_finished_sequence_stays_within_the_positions_of_the_batch():
    """Every proposal for the first text is accepted, none for the second, which ends long after the first."""
    new, proposals, ends = 20, 6, []

    def verify(tokens: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        ends.append(int(first.max()) + proposals)
        return torch.stack([tokens[0].roll(-1), torch.full_like(tokens[1], 9)])

    rows = list(
        speculated(verify, lambda texts, count: [[7] * count, [8] * count], [[1] * 5, [2] * 5], [3, 4], new, proposals)
    )
    assert len(rows) == new
    assert rows[-1] == [7, 9]
    assert max(ends) < 5 + new + proposals


def test_proposals_are_what_followed_before():
    assert look_up([1, 2, 3, 4, 1, 2], 2) == [3, 4]
    assert look_up([1, 2, 3, 9, 2, 3, 7, 2, 3], 3) == [7, 2, 3]
    assert look_up([1, 2, 3], 4) == []
    assert look_up([5], 4) == []
