"""Storage of runs over many images: rows, maps and run settings in one SQLite file."""
