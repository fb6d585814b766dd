"""What a program opts in to; each enters the engine through a seam."""
