"""CUDA graphs: work that is recorded once and replayed."""
