"""Some mutated directories, and all that were once faults: none crashes, hangs, or raises an untyped exception."""

import json
import time
from pathlib import Path

import pytest

from tests.fuzz.mutate import MUTATIONS
from tests.fuzz.outcome import SOUND
from tests.fuzz.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")  # slow kernels

CORPUS = json.loads(Path(__file__).with_name("corpus.json").read_text())

SEED, CASES, SECONDS = 0, 100, 12
"""The seed of the new cases, their maximum number, and the seconds after which no more are run."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(tmp_path_factory.mktemp("fuzz"))


def test_mutated_directories_have_sound_outcomes(session: Session):
    start, kinds, done = time.monotonic(), set(), set()
    for number in range(CASES):
        outcome = session.run(SEED, number)
        assert outcome.kind in SOUND, (number, outcome)
        kinds.add(outcome.kind)
        done.update(outcome.mutations)
        if time.monotonic() - start > SECONDS:
            break
    assert kinds >= {"refused", "equal logits", "other logits"}
    assert done >= {mutation.__name__ for mutation in MUTATIONS} or number < CASES - 1


@pytest.mark.parametrize("fault", CORPUS, ids=lambda fault: f"{fault['source']}-{fault['seed']}-{fault['case']}")
def test_what_was_a_fault_is_none(session: Session, fault: dict):
    outcome = session.run(fault["seed"], fault["case"], fault["source"])
    assert outcome.kind in SOUND, (fault, outcome)
