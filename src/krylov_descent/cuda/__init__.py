"""An engine for NVIDIA GPUs."""
