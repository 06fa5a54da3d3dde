"""EC-SpMV as published: its layout, its block extraction and its kernel. `auto` never takes it for a new weight."""
