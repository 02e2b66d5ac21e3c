"""Documents as pages of sections (``pages/``), pages as text (``renderers/``). Nothing is computed here."""
