"""Train the demo model: a small Llama on the source of Python's standard library.

    python scripts/train_demo.py --out semisparse/demo --device cuda

writes two folders in ``--out``:

    model/   a Hugging Face directory: config, bf16 weights, tokenizer
    text/    calib.txt: calibration text, from training files
             eval.txt: evaluation text, from held-out files

The text is the ``.py`` files of the running interpreter's standard library (``--stdlib`` names another), which every
machine that runs this script has. The hash of its path decides whether a file is held out, so that every version of
Python holds out the same files. The text is under the Python Software Foundation's licence, which is copied to text/.

Losses are in nats per token. Windows have ``CONTEXT`` tokens, of which all but the first are predicted.
"""

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 1024
CONTEXT = 256
END_OF_TEXT = "<|endoftext|>"

HELD_OUT_ONE_IN = 20  # files: one in so many is held out from training
# Generated files; some hold paths of the machine that generated them.
EXCLUDED = ("site-packages", "encodings", "pydoc_data", "_sysconfigdata", "config-")

CALIB_BYTES, EVAL_BYTES, EXCERPT_BYTES = 300_000, 120_000, 3_000


def read_corpus(stdlib: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read the library in ``stdlib``; return the texts of the training files and of the held-out files, by path."""
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    seen: set[str] = set()
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if any(part.startswith(EXCLUDED) for part in name.split("/")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # test files that the parser must refuse
            continue
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        (held_out if is_held_out(name) else train)[name] = text
    return train, held_out


def is_held_out(name: str) -> bool:
    """Return whether a file is held out; only its path decides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def write_text(train: dict[str, str], held_out: dict[str, str], stdlib: Path, out: Path) -> None:
    """Write calib.txt from the training files, eval.txt from the held-out files, and their licence."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "calib.txt").write_bytes(excerpts(train, CALIB_BYTES))
    (out / "eval.txt").write_bytes(excerpts(held_out, EVAL_BYTES))
    if (stdlib / "LICENSE.txt").exists():
        shutil.copyfile(stdlib / "LICENSE.txt", out / "LICENSE.txt")


def excerpts(files: dict[str, str], limit: int) -> bytes:
    """Join excerpts of whole lines, one per file, in random order, as long as they fit into ``limit`` bytes."""
    rng = random.Random(0)
    names = sorted(files)
    rng.shuffle(names)
    chosen, total = [], 0
    for name in names:
        lines = files[name].encode().splitlines(keepends=True)
        line, excerpt = rng.randrange(len(lines)), b""
        while line < len(lines) and len(excerpt) + len(lines[line]) < EXCERPT_BYTES:
            excerpt, line = excerpt + lines[line], line + 1
        if EXCERPT_BYTES // 2 < len(excerpt) < limit - total:
            chosen.append(excerpt)
            total += len(excerpt) + 1
    return b"\n".join(chosen)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which encodes any text without loss."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Return the token ids of all ``texts``, [tokens] int64; each text starts with the end-of-text token."""
    encoded = tokenizer.backend_tokenizer.encode_batch([END_OF_TEXT + text for text in texts])
    return torch.tensor([token for text in encoded for token in text.ids])


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama with 1.6 million parameters; 88 % of them are in linear layers."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: linear warm-up over 3 % of ``steps``, then a cosine to 1 % of ``peak``."""
    warm_up = max(1, steps * 3 // 100)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """Return AdamW with weight decay on the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def draw_windows(tokens: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ``count`` random windows of ``tokens``: [count, CONTEXT] int64."""
    starts = torch.randint(len(tokens) - CONTEXT, (count, 1), generator=generator).to(tokens.device)
    return tokens[starts + torch.arange(CONTEXT, device=tokens.device)]


@torch.no_grad()
def mean_loss(model: PreTrainedModel, tokens: torch.Tensor, batch: int = 256) -> float:
    """Return the mean loss over consecutive windows of ``tokens``; a shorter window at the end is not scored."""
    windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = sum(
        model(input_ids=part, labels=part, use_cache=False).loss.item() * len(part) for part in windows.split(batch)
    )
    return total / len(windows)


class BestWeights:
    """The weights of the lowest held-out loss.

    Args:
        model: that is trained.
        patience: how many times in a row the loss may fail to fall before training stops.
    """

    def __init__(self, model: PreTrainedModel, patience: int) -> None:
        self._model, self._patience, self._failures = model, patience, 0
        self._loss, self._weights = math.inf, model.state_dict()

    def keep_if_best(self, loss: float) -> bool:
        """Copy the present weights if ``loss`` is the lowest; return whether training should go on."""
        if loss < self._loss:
            self._loss, self._failures = loss, 0
            self._weights = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        else:
            self._failures += 1
        return self._failures < self._patience

    def restore(self) -> None:
        """Give the model the weights of the lowest loss."""
        self._model.load_state_dict(self._weights)


def train_model(
    model: PreTrainedModel,
    train: torch.Tensor,
    held_out: torch.Tensor,
    *,
    steps: int,
    batch: int,
    peak: float,
    seed: int,
    compiled: bool = False,
    best: BestWeights | None = None,
    **options: bool,
) -> None:
    """Train ``model`` in place, with fp32 weights and bf16 autocast, and print the loss.

    Args:
        model: on the device of the tokens.
        train: [tokens] int64 to train on.
        held_out: [tokens] int64, whose loss is printed.
        steps: optimizer steps.
        batch: windows of ``CONTEXT`` tokens per step.
        peak: highest learning rate.
        seed: of the windows drawn.
        compiled: whether to compile the forward and backward passes.
        best: if given, training ends when the held-out loss no longer falls, and keeps the weights of its lowest value.
        options: further arguments of the forward passes whose loss is trained on.
    """
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(seed)
    forward = torch.compile(model) if compiled else model
    autocast = torch.autocast(train.device.type, dtype=torch.bfloat16)
    report_every, started = max(100 if best is None else 1, steps // 20), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        windows = draw_windows(train, batch, generator)
        with autocast:
            loss = forward(input_ids=windows, labels=windows, use_cache=False, **options).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % report_every == 0 or step + 1 == steps:
            with autocast:
                held_out_loss = mean_loss(model, held_out)
            seconds = time.perf_counter() - started
            print(
                f"step {step + 1:6d}  loss {loss.item():.4f}  held-out {held_out_loss:.4f}  {seconds:6.1f} s",
                flush=True,
            )
            if best is not None and not best.keep_if_best(held_out_loss):
                break
    if best is not None:
        best.restore()


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int = 120) -> str:
    """Continue ``prompt`` by up to ``tokens`` tokens, sampled at temperature 0.7."""
    ids = torch.tensor([tokenizer.encode(prompt)], device=model.device)
    ids = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, temperature=0.7
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def count_parameters(model: LlamaForCausalLM) -> dict[str, int]:
    """Count the parameters of the linear layers, of the embedding (tied to the output), and of the norms."""
    linear = sum(
        part.weight.numel()
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    )
    embedding = model.get_input_embeddings().weight.numel()
    return {"linear": linear, "embedding": embedding, "norms": model.num_parameters() - linear - embedding}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder to write model/ and text/ in")
    parser.add_argument("--steps", type=int, default=4_000, help="optimizer steps; 0 trains nothing, writes text/ only")
    parser.add_argument("--batch", type=int, default=256, help=f"windows of {CONTEXT} tokens per step")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="standard library to read"
    )
    parser.add_argument("--compile", action="store_true", help="compile the model's forward and backward passes")
    return parser.parse_args()


def main() -> None:
    """Read the library, train the model on it, and write the model and the text."""
    arguments = parse_arguments()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with it
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(arguments.seed)

    train_files, held_out_files = read_corpus(arguments.stdlib)
    write_text(train_files, held_out_files, arguments.stdlib, arguments.out / "text")
    if not arguments.steps:
        return

    tokenizer = train_tokenizer(list(train_files.values()))
    train = encode(tokenizer, list(train_files.values())).to(arguments.device)
    held_out = encode(tokenizer, list(held_out_files.values())).to(arguments.device)
    model = build_model(tokenizer).to(arguments.device)
    print(
        f"{len(train_files)} files, {len(train):,} tokens to train on; "
        f"{len(held_out_files)} files, {len(held_out):,} tokens held out; parameters: {count_parameters(model)}"
    )

    train_model(
        model,
        train,
        held_out,
        steps=arguments.steps,
        batch=arguments.batch,
        peak=arguments.lr,
        seed=arguments.seed,
        compiled=arguments.compile,
    )

    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(arguments.out / "model")
    tokenizer.save_pretrained(arguments.out / "model")
    losses = {"train": mean_loss(model, train[: len(held_out)]), "held_out": mean_loss(model, held_out)}
    print("as saved, in bf16:", json.dumps(losses))
    print(sample(model, tokenizer, "def "), "\n---\n", sample(model, tokenizer, "class "), sep="")


if __name__ == "__main__":
    main()
