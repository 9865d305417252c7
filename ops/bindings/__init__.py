"""How a framework calls the planned implementations, one module per framework."""
