"""Writing models in the checkpoint formats of other tools."""
