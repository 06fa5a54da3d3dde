"""The small trained model that ships with the project, the text that goes with it, and the main job run on both."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
CALIBRATION = Path(__file__).parent / "text" / "calib.txt"
HELD_OUT = Path(__file__).parent / "text" / "eval.txt"
