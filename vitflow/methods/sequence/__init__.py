"""What only sequences need: which tokens are words, what each may see, and rows of rollout that grow."""
