"""Quantisation arithmetic that every format shares."""
