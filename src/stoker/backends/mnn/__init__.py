"""Models that are folders of MNN's language models, on MNN's own engine: one sequence at a time."""
