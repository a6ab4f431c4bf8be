"""Services: objects with the state of a feature on a rank. The first handler creates them."""
