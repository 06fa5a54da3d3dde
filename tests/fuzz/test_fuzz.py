"""Some mutated directories, and all that were once faults: none crashes, hangs, or raises an untyped exception."""

import json
from pathlib import Path

import pytest

from tests.fuzz.mutate import MUTATIONS
from tests.fuzz.outcome import SOUND
from tests.fuzz.session import Session

pytestmark = pytest.mark.filterwarnings("ignore")  # slow kernels

CORPUS = json.loads(Path(__file__).with_name("corpus.json").read_text())

SEED, CASES = 0, 100
"""The seed of the new cases, and their number."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("cases", [range(15), pytest.param(range(15, CASES), marks=pytest.mark.slow)], ids=len)
def test_mutated_directories_have_sound_outcomes(session: Session, cases: range):
    kinds, done = set(), set()
    for number in cases:
        outcome = session.run(SEED, number)
        assert outcome.kind in SOUND, (number, outcome)
        kinds.add(outcome.kind)
        done.update(outcome.mutations)
    assert kinds >= {"refused", "equal logits", "other logits"}
    assert done >= {mutation.__name__ for mutation in MUTATIONS} or len(cases) < CASES / 2


@pytest.mark.parametrize("fault", CORPUS, ids=lambda fault: f"{fault['source']}-{fault['seed']}-{fault['case']}")
def test_what_was_a_fault_is_none(session: Session, fault: dict):
    outcome = session.run(fault["seed"], fault["case"], fault["source"])
    assert outcome.kind in SOUND, (fault, outcome)
