"""From a user's texts to the model's tokens and back, with what is refused of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semisparse.errors import InputError

NO_TOKENIZER = "the model has no tokenizer; give one to Engine"


def tokenize_all(tokenizer: Any, prompts: Sequence[str], vocabulary: int, special_tokens: bool) -> list[list[int]]:
    """Return the token ids of each prompt.

    Args:
        tokenizer: transformers', a `RecordedTokenizer` or None.
        prompts: texts.
        vocabulary: tokens that the model knows.
        special_tokens: whether the tokenizer adds special tokens, such as BOS.
    Raises:
        InputError: there is no tokenizer or no prompt; or one is no text, empty, or has a token that the model lacks.
    """
    if isinstance(prompts, str) or not prompts:
        raise InputError(f"prompts is {'one text' if prompts else 'empty'}, expected a list of one text or more")
    return [_tokenize(tokenizer, prompt, vocabulary, special_tokens) for prompt in prompts]


def _tokenize(tokenizer: Any, prompt: str, vocabulary: int, special_tokens: bool) -> list[int]:
    if tokenizer is None:
        raise InputError(NO_TOKENIZER)
    if not isinstance(prompt, str):
        raise InputError(f"a prompt is {type(prompt).__name__}, expected text")
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # Python decodes invalid UTF-8 to these
        raise InputError("a prompt is not valid UTF-8 text")
    tokens = list(tokenizer(prompt, add_special_tokens=special_tokens).input_ids)
    if not tokens:
        raise InputError("a prompt is empty; give at least one token of text")
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        raise InputError(
            f"the tokenizer gives token {outside[0]}, the model knows {vocabulary} tokens: they do not belong together"
        )
    return tokens


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens, without special tokens.

    Raises:
        InputError: there is no tokenizer.
    """
    if tokenizer is None:
        raise InputError(NO_TOKENIZER)
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def chat_prompt(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return a conversation as a prompt, by the tokenizer's chat template.

    Raises:
        InputError: the tokenizer has no chat template, or it refuses the conversation.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise InputError("the model's tokenizer has no chat template: it was not trained for conversations")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except MemoryError:
        raise
    except Exception as error:  # a template is a program of the model's author
        raise InputError(
            f"the tokenizer's chat template refuses the conversation: {type(error).__name__}: {error}"
        ) from error


def end_tokens(model: Any) -> set[int]:
    """Return the tokens that end a text: those of generation_config.json, or else of config.json.

    Raises:
        InputError: the file holds anything else.
    """
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = getattr(model.config.get_text_config(), "eos_token_id", None)
    listed = ends if isinstance(ends, list | tuple) else [] if ends is None else [ends]
    for end in listed:
        if not isinstance(end, int) or isinstance(end, bool):
            raise InputError(
                f"eos_token_id holds {str(end)[:99]!r} in generation_config.json or config.json, expected a token's"
                " number or a list of them"
            )
    return set(listed)
