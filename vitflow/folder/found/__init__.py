"""What is read back from a folder run: its manifest, its maps, overlays drawn later, and its report."""
