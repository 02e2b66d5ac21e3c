"""Conversion of documents to pages of sections (``pages/``), and of pages to text (``renderers/``)."""
