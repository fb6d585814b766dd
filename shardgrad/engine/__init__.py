"""One training step, from the first all-gather to the last reduce-scatter."""
