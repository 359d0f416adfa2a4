"""The commands: a file for each, or for some that are of one kind. Each imports torch only once it runs."""
