"""How parameters are cut over ranks: frozen facts, which import nothing of the engine."""
