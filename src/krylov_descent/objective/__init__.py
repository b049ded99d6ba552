"""The loss as a mean over samples."""
