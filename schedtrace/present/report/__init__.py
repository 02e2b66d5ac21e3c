"""The report page: the documents' words beside a timeline to zoom into, in one HTML file."""
