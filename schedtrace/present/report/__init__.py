"""Report page in one HTML file: the documents' words and a timeline that the reader can zoom."""
