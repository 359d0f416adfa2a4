"""What is asked of a model, and by which methods: targets, the table of methods, their options and titles."""
