"""Looking inside a trained model: what its encoding and its attention make of a text, as a page and as figures."""
