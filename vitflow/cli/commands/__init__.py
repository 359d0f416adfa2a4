"""Commands, one file for each or for a few related ones. Each imports torch when it runs."""
