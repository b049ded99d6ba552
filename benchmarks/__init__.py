"""What things cost, measured side by side: `python -m benchmarks --help`.

Every figure is a ratio within one run, with the environment beside it. A part (`product`, `step`,
…) consists of sections; each section writes one JSON file into `results/<part>/` when it is done,
`results/<part>-cuda/` for a GPU. Tables and figures in README and docs are made from those files.
"""
