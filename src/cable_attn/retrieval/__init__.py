"""Long documents: an encoder trained on short passages, and how well it finds documents many times longer."""
