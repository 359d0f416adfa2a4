"""vitflow: see what a Vision Transformer looks at."""
