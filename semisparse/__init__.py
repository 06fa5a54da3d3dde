"""semisparse makes sparse language models pay: prune, pack and run them faster and smaller than dense."""
