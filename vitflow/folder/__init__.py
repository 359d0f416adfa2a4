"""Many pictures, resumable."""
