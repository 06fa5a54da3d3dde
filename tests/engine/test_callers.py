"""Callers of an engine: several threads, its own callback, and prompts that are none."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from semisparse.engine import Engine
from semisparse.errors import InputError
from tests.models import byte_tokenizer, random_model

THREADS, NEW = 4, 24


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(random_model("llama"), byte_tokenizer())


def text_of(engine: Engine, prompt: str) -> str:
    return engine.generate([prompt], NEW)[0].text


def test_threads_do_not_share_the_cache(engine: Engine):
    prompts = ["a" * (1 + i) + "bc" * i for i in range(3 * THREADS)]
    expected = [text_of(engine, prompt) for prompt in prompts]
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(lambda prompt: text_of(engine, prompt), prompts)) == expected


def test_a_callback_cannot_call_its_engine(engine: Engine):
    with pytest.raises(InputError, match="on_text called its own engine"):
        engine.generate(["a"], NEW, on_text=lambda number, text: engine.generate(["b"], NEW))
    with pytest.raises(ZeroDivisionError):
        engine.generate(["a"], NEW, on_text=lambda number, text: 1 / 0)
    assert text_of(engine, "a")  # neither leaves the engine locked


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("abc", "prompts is one text"),
        ([], "prompts is empty"),
        ([""], "a prompt is empty"),
        ([None], "a prompt is NoneType"),
        ([b"a"], "a prompt is bytes"),
        (["a\udcff"], "not valid UTF-8"),
    ],
)
def test_prompts_that_are_none_are_refused(engine: Engine, prompts, message: str):
    with pytest.raises(InputError, match=message):
        engine.generate(prompts, 4)
    with pytest.raises(InputError, match=message):
        engine.prepare(prompts, 4)


def test_a_stop_that_is_one_text_is_refused(engine: Engine):
    with pytest.raises(InputError, match="stop is the text 'end'"):
        engine.generate(["a"], 4, stop="end")
