"""From a recorded pass to maps: what must be recorded, each method's maps, and what is made of them."""
