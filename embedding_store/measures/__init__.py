"""What a process measures of itself: counters to add to, and the values that are read from them."""
