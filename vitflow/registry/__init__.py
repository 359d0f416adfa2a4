"""Table of methods and table of options, from which signatures, checks and help are derived."""
