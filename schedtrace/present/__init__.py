"""Facts to text and pictures. Nothing is computed here, and only here rich is used."""
