"""What each rank is doing, for the moment when a collective hangs or ranks differ."""
