"""Whether a run fits devices that nobody has rented yet, and how fast it is."""
