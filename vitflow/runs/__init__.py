"""What any run over many pictures remembers: its journal, its rows, what it was asked, and where it writes."""
