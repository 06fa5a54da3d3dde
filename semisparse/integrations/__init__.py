"""Adapters to transformers and vLLM."""
