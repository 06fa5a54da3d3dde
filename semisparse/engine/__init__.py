"""Running models: static cache, captured decode step, sampling."""
