"""Derivatives through Linear layers, computed from their inputs, outputs and output gradients."""
