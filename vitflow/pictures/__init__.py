"""Pictures: read, place and draw them."""
