"""What any run over many images keeps: one SQLite file with its rows, its maps, and what it computes."""
