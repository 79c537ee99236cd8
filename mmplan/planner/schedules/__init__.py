"""Schedule families, one idea per file, and the search for better ones in `search`."""
