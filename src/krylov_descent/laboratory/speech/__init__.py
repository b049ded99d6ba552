"""Noisy spoken digits, the open stand-in for Aurora-2: from recordings to frames to words."""
