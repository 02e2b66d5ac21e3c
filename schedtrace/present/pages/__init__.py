"""Documents to sections, one module per kind of document. No module here imports a renderer."""
