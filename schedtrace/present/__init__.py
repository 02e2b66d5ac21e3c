"""Documents to pages of sections (``pages/``), pages to text (``renderers/``). Nothing is computed here."""
