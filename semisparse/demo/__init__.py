"""The small trained model that ships with the project, its calibration and evaluation texts, and a compressed copy."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
CHOSEN = Path(__file__).parent / "chosen"
"""The model compressed to 4.5 bits per weight. The search takes minutes on two cores, so its result is stored:
``semisparse compress semisparse/demo/model --target bits=4.5 --calib semisparse/demo/text/calib.txt --samples 64 --set
search_effort=16 --out semisparse/demo/chosen``.
"""
CALIBRATION = Path(__file__).parent / "text" / "calib.txt"
HELD_OUT = Path(__file__).parent / "text" / "eval.txt"
