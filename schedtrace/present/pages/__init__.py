"""Conversion of documents to sections, with one module per kind of document.

No module here imports a renderer.
"""
