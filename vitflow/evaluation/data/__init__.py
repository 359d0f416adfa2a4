"""What is known of the pictures that maps are measured on."""
