"""What things cost, measured side by side: `python -m benchmarks --help`.

Every figure is a ratio within one run, with the environment beside it. Each part writes one JSON
file into `results/`; the tables in README and docs are generated from those files.
"""
