"""What a browser opens: pages that need no network."""
