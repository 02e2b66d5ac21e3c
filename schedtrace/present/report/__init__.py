"""Report page in one HTML file: the documents' words beside a timeline to zoom into."""
