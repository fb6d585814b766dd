"""Optional features. Each enters the engine through an interface of the engine."""
