"""One file per method; all take the data in `step` and return a `StepResult`."""
