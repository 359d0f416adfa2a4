"""One forward pass of a model as it is, recorded: the only place that touches a running model."""
