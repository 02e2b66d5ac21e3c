"""Documents to sections, one kind of document a module. No renderer is known here."""
