"""Accuracy on two multiple-choice tasks made from held-out text: one CSV row per model, recipe and task.

    python benchmarks/text_tasks.py DATA results/text_tasks.csv

DATA is a directory with ``models/`` and ``text/``. Task ``last_word``: which of four words ends a line; ``next_line``:
which of four lines comes after eight given ones. The wrong choices are right ones of other questions. All recipes get
the same questions, from the ``eval`` text. lm-eval scores them: ``acc`` by log-likelihood, ``acc_norm`` per byte. Rows
that the CSV already has are not measured again.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import yaml
from models import MODELS, Subject, parser_of
from rows import read_rows, write_rows

from semisparse.evaluate import run_tasks

RECIPES: dict[str, tuple[str, tuple[str, ...]] | None] = {
    "dense": None,
    "6:8": ("rheosparse", ("pattern=6:8", "search=none")),
    "32:64": ("rheosparse", ("search=none",)),
    "32:64, bqpo": ("rheosparse", ("search=none", "tune=bqpo")),
    "2:4": ("rheosparse", ("pattern=2:4", "search=none")),
    "W4": ("dense-w4", ()),
    "W3": ("dense-w3", ()),
    "W2 g64": ("dense-w2", ("pattern=g64@0%",)),
    "W4S50": ("gqsa", ("tune=none",)),
}
"""Name in the table -> recipe and settings; None for the dense model."""

COLUMNS = ("model", "recipe", "task", "acc", "acc_norm", "stderr", "questions", "samples", "seed")

LINES = 8
"""Lines of context before the line to be chosen."""

LONGEST = 200
"""Maximum number of characters of a line to be chosen."""

CONTEXT = 400
"""Maximum number of characters of context of a word."""


def main() -> None:
    """Measure the rows that the CSV lacks."""
    parser = parser_of(__doc__, samples=None)
    parser.add_argument("--models", default="stories260k,babyllama-1m,pycode-11m")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = read_rows(options.csv)
    for name in options.models.split(","):
        done = {row["recipe"] for row in rows if row["model"] == name}
        missing = [recipe for recipe in RECIPES if recipe not in done]
        if not missing:
            continue
        subject = Subject(name, options)
        with tempfile.TemporaryDirectory() as folder:
            tasks = write_tasks(
                options.shared / "text" / MODELS[name][1], Path(folder), options.questions, options.seed
            )
            for recipe in missing:
                chosen = RECIPES[recipe]
                model = subject.dense
                if chosen:
                    model, _ = subject.compress(*chosen, options.seed)
                found = run_tasks(model.to(subject.device), subject.tokenizer, [str(task) for task in tasks])
                for task, metrics in found.items():
                    numbers = (metrics["acc,none"], metrics["acc_norm,none"], metrics["acc_stderr,none"])
                    values = (
                        name,
                        recipe,
                        task,
                        *numbers,
                        options.questions,
                        options.samples or "default",
                        options.seed,
                    )
                    rows.append(dict(zip(COLUMNS, map(str, values), strict=True)))
                    print(*values, flush=True)
                write_rows(options.csv, rows, COLUMNS)


def write_tasks(text: Path, folder: Path, count: int, seed: int) -> list[Path]:
    """Write both tasks' questions and lm-eval's YAML files.

    Args:
        text: held-out text; of a .jsonl file the documents under ``text``.
        folder: where to write.
        count: questions per task.
        seed: chooses questions and wrong choices.
    Returns:
        The YAML files.
    """
    content = text.read_text()
    documents = [json.loads(line)["text"] for line in content.splitlines()] if text.suffix == ".jsonl" else [content]
    generator = random.Random(seed)
    questions = {"last_word": words(documents), "next_line": lines(documents)}
    written = []
    for task, found in questions.items():
        chosen = generator.sample(found, min(count, len(found)))
        data = folder / f"{task}.jsonl"
        with data.open("w") as file:
            for context, answer in chosen:
                others = sorted({other for _, other in chosen} - {answer})
                choices = [answer, *generator.sample(others, 3)]
                generator.shuffle(choices)
                row = {"context": context, "choices": choices, "answer": choices.index(answer)}
                file.write(json.dumps(row) + "\n")
        declaration = {
            "task": task,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "" if task == "next_line" else " ",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
        written.append(folder / f"{task}.yaml")
        written[-1].write_text(yaml.safe_dump(declaration))
    return written


def words(documents: list[str]) -> list[tuple[str, str]]:
    """Return (text before, last word) of every paragraph or line of ten words or more."""
    found = []
    for document in documents:
        for line in document.splitlines():
            before, _, last = line.strip().rpartition(" ")
            if len(before.split()) >= 9 and last.strip(".!?\"'").isalpha():
                found.append((before[-CONTEXT:].lstrip(), last.strip(".!?\"'")))
    return found


def lines(documents: list[str]) -> list[tuple[str, str]]:
    """Return (`LINES` lines, the line after them) of a text; in documents of few lines, sentences stand for lines."""
    found = []
    for document in documents:
        parts, end = [line for line in document.splitlines() if line.strip()], "\n"
        if len(parts) <= LINES:
            parts, end = [f" {sentence.strip()}." for sentence in document.split(".") if sentence.strip()], ""
        found += [
            (end.join(parts[i - LINES : i]).lstrip() + end, parts[i])
            for i in range(LINES, len(parts), LINES + 1)
            if 12 <= len(parts[i].strip()) <= LONGEST
        ]
    return found


if __name__ == "__main__":
    main()
