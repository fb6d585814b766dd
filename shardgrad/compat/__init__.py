"""What torch's own tools expect to see."""
