"""How fast we are, side by side with what one would use instead."""
