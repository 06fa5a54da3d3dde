"""Quantisation arithmetic that the formats and the compression algorithms share."""
