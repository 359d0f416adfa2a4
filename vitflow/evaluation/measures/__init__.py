"""What a map is worth: one file a question."""
