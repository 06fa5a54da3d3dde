"""Train the demo model: a small Llama that has read Python's standard library.

    python train.py --out . --device cuda

writes two folders below ``--out``:

    model/   a Hugging Face directory: config, bf16 weights, tokenizer
    text/    calib.txt, from files the model trained on, to calibrate compression with;
             eval.txt, from files it never saw, to measure the loss on

The text is the ``.py`` files of the running interpreter's standard library (``--stdlib`` names another), so every
machine that can run this script has it. The hash of a file's path decides on which side of the split the file falls,
and so a file that is held out in one version of Python is held out in all of them. That text, and what is excerpted
from it, is under the Python Software Foundation's licence, which is copied beside the excerpts.

Every loss is in nats per token, over windows of ``CONTEXT`` tokens in which all tokens but the first are predicted.
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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
CONTEXT = 256
END_OF_TEXT = "<|endoftext|>"

HELD_OUT_ONE_IN = 20
# Tables and files that a machine wrote; some hold the paths of the machine they were written on.
NOT_PROSE = ("site-packages", "encodings", "pydoc_data", "_sysconfigdata", "config-")

CALIB_BYTES, EVAL_BYTES, EXCERPT_BYTES = 300_000, 120_000, 3_000


def read_corpus(stdlib: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read the library below ``stdlib``: path and text of each training file, and of each held-out file."""
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    seen: set[str] = set()
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        if any(part.startswith(NOT_PROSE) for part in name.split("/")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # the library's own tests of what the parser must refuse
            continue
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        (held_out if is_held_out(name) else train)[name] = text
    return train, held_out


def is_held_out(name: str) -> bool:
    """Decide by the hash of a file's path, so that neither the machine nor the version of Python matters."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def write_text(train: dict[str, str], held_out: dict[str, str], stdlib: Path, out: Path) -> None:
    """Write calib.txt from the training files, eval.txt from the held-out files, and the licence of both."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "calib.txt").write_bytes(excerpts(train, CALIB_BYTES))
    (out / "eval.txt").write_bytes(excerpts(held_out, EVAL_BYTES))
    if (stdlib / "LICENSE.txt").exists():
        shutil.copyfile(stdlib / "LICENSE.txt", out / "LICENSE.txt")


def excerpts(files: dict[str, str], limit: int) -> bytes:
    """Join runs of whole lines, one run a file from as many files as fit, until ``limit`` bytes are nearly full."""
    chosen = random.Random(0)
    names = sorted(files)
    chosen.shuffle(names)
    parts, total = [], 0
    for name in names:
        lines = files[name].encode().splitlines(keepends=True)
        at, part = chosen.randrange(len(lines)), b""
        while at < len(lines) and len(part) + len(lines[at]) < EXCERPT_BYTES:
            part, at = part + lines[at], at + 1
        if EXCERPT_BYTES // 2 < len(part) < limit - total:
            parts.append(part)
            total += len(part) + 1
    return b"\n".join(parts)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; nothing is unknown to it, and decoding what it encoded is exact."""
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
    """Tokens of all ``texts`` in one row, each text led by the end-of-text token."""
    encoded = tokenizer.backend_tokenizer.encode_batch([END_OF_TEXT + text for text in texts])
    return torch.tensor([token for text in encoded for token in text.ids])


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 1.6 million parameters, of which 88 % are in its linear layers."""
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
    """Rise linearly over the first 3 % of ``steps``, then fall along a cosine to 1 % of ``peak``."""
    warm_up = max(1, steps * 3 // 100)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves the norms' gains alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    gains = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def draw_windows(tokens: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` windows ``[count, CONTEXT]`` of ``tokens``, from places drawn at random."""
    starts = torch.randint(len(tokens) - CONTEXT, (count, 1), generator=generator).to(tokens.device)
    return tokens[starts + torch.arange(CONTEXT, device=tokens.device)]


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, tokens: torch.Tensor, batch: int = 256) -> float:
    """Mean loss over consecutive windows of ``tokens``; what is left over at the end is not scored."""
    windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = sum(
        model(input_ids=part, labels=part, use_cache=False).loss.item() * len(part) for part in windows.split(batch)
    )
    return total / len(windows)


def train_model(
    model: LlamaForCausalLM,
    train: torch.Tensor,
    held_out: torch.Tensor,
    *,
    steps: int,
    batch: int,
    peak: float,
    seed: int,
    compiled: bool,
) -> None:
    """Train ``model`` in place, in fp32 weights with bf16 products, and print the loss as it falls."""
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(seed)
    forward = torch.compile(model) if compiled else model
    autocast = torch.autocast(train.device.type, dtype=torch.bfloat16)
    report_every, started = max(100, steps // 20), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        windows = draw_windows(train, batch, generator)
        with autocast:
            loss = forward(input_ids=windows, labels=windows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % report_every == 0 or step + 1 == steps:
            with autocast:
                unseen = mean_loss(model, held_out)
            seconds = time.perf_counter() - started
            print(f"step {step + 1:6d}  loss {loss.item():.4f}  held-out {unseen:.4f}  {seconds:6.1f} s", flush=True)


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, tokens: int = 120) -> str:
    """Continue ``prompt`` by ``tokens`` tokens, drawn at a temperature of 0.7."""
    ids = torch.tensor([tokenizer.encode(prompt)], device=model.device)
    ids = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=True, temperature=0.7
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def count_parameters(model: LlamaForCausalLM) -> dict[str, int]:
    """Parameters in the blocks' linear layers, in the embedding (tied to the output), and in the norms."""
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
    parser.add_argument("--batch", type=int, default=256, help=f"windows of {CONTEXT} tokens in a step")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate at its peak")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="library to read")
    parser.add_argument("--compile", action="store_true", help="compile the model's forward and backward passes")
    return parser.parse_args()


def main() -> None:
    """Read the library, train on it, and write the model and the two texts."""
    arguments = parse_arguments()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not repeat a sum bit for bit
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
