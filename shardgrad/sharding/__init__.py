"""How parameters are sharded over ranks: frozen facts, which import nothing of the engine."""
