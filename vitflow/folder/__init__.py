"""Many images, resumable."""
