"""The pure functions a training step is made of."""
