"""One file per method. Each `step` takes the data and returns a `StepResult`."""
